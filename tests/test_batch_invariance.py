"""Continuous batching: a reply has the same bits alone, in company and joining late; who is done leaves at once."""

import asyncio
import math
import random
from collections.abc import Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import qwen3, tokenizer
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from condensegrpo.core.errors import SamplerError
from condensegrpo.core.trajectory import FinishReason, Generation, SamplingParams
from condensegrpo.samplers import decoding
from condensegrpo.samplers.decoding import SUPPORTED, BatchRow, ContinuousBatch, supports
from condensegrpo.samplers.packed_attention import Slots
from condensegrpo.samplers.transformers import TransformersSampler

VOCABULARY = 83
SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 48,
    "intermediate_size": 72,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "initializer_range": 0.3,
    "pad_token_id": 0,
    "sliding_window": None,
}
Asked = tuple[Sequence[int], SamplingParams]


def model(kind: str = "qwen2", **changes: Any) -> PreTrainedModel:
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **SHAPE | changes)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


def decoder(of: PreTrainedModel | None = None, most: int = 64) -> ContinuousBatch:
    return ContinuousBatch(
        of or model(), most=most, decode=lambda rows: ["".join(f"w{token}" for token in row) for row in rows]
    )


def requests(count: int, seed: int = 0) -> list[Asked]:
    draw = random.Random(seed)
    lengths = [draw.choice((1, 2, 7, 16, 33, 70)) for _ in range(count)]
    return [
        (
            [draw.randrange(VOCABULARY) for _ in range(length)],
            SamplingParams(max_tokens=draw.randint(1, 9), seed=place, temperature=(1.0, 0.7, 0.0)[place % 3]),
        )
        for place, length in enumerate(lengths)
    ]


def play(by: ContinuousBatch, asked: Sequence[Asked], arrivals: Mapping[int, int] | None = None) -> list[Generation]:
    """The replies, in order. Arrivals: before which pass a request joins; the others join at once."""
    waiting = sorted(range(len(asked)), key=lambda place: (arrivals or {}).get(place, 0))
    places: dict[BatchRow, int] = {}
    replies: dict[int, Generation] = {}
    began = by.passes
    while len(replies) < len(asked):
        while waiting and by.room and ((arrivals or {}).get(waiting[0], 0) <= by.passes - began or not by.replies):
            place = waiting.pop(0)
            places[by.join(*asked[place], abandoned=lambda: False)] = place
        replies |= {places[reply]: generation for reply, generation in by.step()}
    return [replies[place] for place in range(len(asked))]


# --- bits -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["qwen2", "llama"])  # with and without biases
def test_a_reply_has_the_same_bits_alone_in_company_and_joining_late(kind: str) -> None:
    by, asked = decoder(model(kind)), requests(10)
    alone = [play(by, [each])[0] for each in asked]
    assert play(by, asked) == alone
    assert play(by, asked, {place: place * 5 % 11 for place in range(10)}) == alone
    assert play(decoder(model(kind), most=3), asked[::-1]) == alone[::-1]


def test_threads_do_not_change_bits() -> None:
    asked = requests(6)
    alone = [play(decoder(), [each])[0] for each in asked]
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        assert play(decoder(), asked) == alone
    finally:
        torch.set_num_threads(before)


def test_prompts_computed_in_parts_have_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = requests(8)
    whole = play(decoder(), asked)
    monkeypatch.setattr(decoding, "PASS_TOKENS", 11)
    by = decoder()
    assert play(by, asked) == whole
    assert by.passes > sum(len(prompt) for prompt, _ in asked) / 11


def siblings(prompt: Sequence[int]) -> list[Asked]:
    return [(prompt, SamplingParams(max_tokens=8, seed=seed, trajectory=f"g/{seed}")) for seed in range(5)]


@pytest.mark.parametrize("arrivals", [{}, {1: 2, 2: 2, 3: 4, 4: 5}])
def test_equal_prompts_are_computed_once_and_give_the_bits_of_computing_each(arrivals: Mapping[int, int]) -> None:
    of, asked, computed = model(), siblings(range(3, 63)), list[int]()
    alone = [play(decoder(of), [each])[0] for each in asked]
    of.get_input_embeddings().register_forward_hook(lambda _, tokens, __: computed.append(tokens[0].numel()))
    assert play(decoder(of), asked, arrivals) == alone
    assert len([tokens for tokens in computed if tokens > 32]) == 1  # the pass with the 60 tokens of the prompt
    assert max(computed) < 2 * 60


@pytest.mark.parametrize("length", [1, 16, 30])
def test_a_reply_computes_its_prompt_if_its_leader_leaves_first(monkeypatch: pytest.MonkeyPatch, length: int) -> None:
    monkeypatch.setattr(decoding, "PASS_TOKENS", 11)  # a prompt of 30 takes three passes
    asked = siblings(range(3, 3 + length))
    alone = [play(decoder(), [each])[0] for each in asked]
    by, passes = decoder(), count()
    replies = {by.join(*asked[0], abandoned=lambda: next(passes) == 1): 0}
    replies |= {by.join(*each, abandoned=lambda: False): index for index, each in enumerate(asked[1:], start=1)}
    ended: dict[int, Generation] = {}
    while by.replies:
        ended |= {replies[reply]: generation for reply, generation in by.step()}
    assert ended.pop(0).finish is FinishReason.ABORT
    assert [ended[index] for index in range(1, 5)] == alone[1:]


def conversation(by: ContinuousBatch, trajectory: str, *, turns: int = 4) -> list[Asked]:
    """What a trajectory asks: every prompt continues the last one and its reply."""
    draw = random.Random(trajectory)
    asked: list[Asked] = []
    prompt = [draw.randrange(VOCABULARY) for _ in range(20)]
    for turn in range(turns):
        asked.append((prompt, SamplingParams(max_tokens=4, seed=turn, trajectory=trajectory)))
        prompt = [*prompt, *play(by, asked[-1:])[0].token_ids, *draw.choices(range(VOCABULARY), k=9 * turn + 1)]
    return asked


def test_kept_keys_and_values_give_the_bits_of_computing_them_again() -> None:
    by = decoder()
    asked = conversation(by, "g/0")
    kept = decoder()
    replies = []
    for turn, (prompt, params) in enumerate(asked):
        reply = kept.join(prompt, params, abandoned=lambda: False)
        assert reply.filled == (len(asked[turn - 1][0]) + 3 if turn else 0)  # all but the last token sampled
        while kept.replies:
            replies += [generation for _, generation in kept.step()]
    fresh = [play(decoder(), [each])[0] for each in asked]
    assert replies == fresh


def test_a_prompt_that_parts_from_the_last_one_keeps_what_both_begin_with() -> None:
    by = decoder()
    params = SamplingParams(max_tokens=3, trajectory="g/0")
    play(by, [([5, 6, 7, 8, 9], params)])
    other = [5, 6, 7, 1, 2, 3]
    assert by.join(other, params, abandoned=lambda: False).filled == 3
    assert [generation for _ in range(3) for _, generation in by.step()] == play(decoder(), [(other, params)])


def test_bits_do_not_depend_on_which_trajectories_kept_their_slots() -> None:
    plenty, scarce = decoder(most=8), decoder(most=2)  # there every trajectory loses its slot to the others
    conversations = [conversation(plenty, f"g/{sample}", turns=3) for sample in range(3)]
    in_turn = [asked[turn] for turn in range(3) for asked in conversations]
    assert [play(scarce, [each]) for each in in_turn] == [play(plenty, [each]) for each in in_turn]


def plain_logprobs(of: PreTrainedModel, prompt: Sequence[int], reply: Generation) -> torch.Tensor:
    """(A,) nats, of one pass without slots."""
    with torch.no_grad():
        logits = of(torch.tensor([[*prompt, *reply.token_ids]]), use_cache=False).logits[0, len(prompt) - 1 : -1]
    return logits.log_softmax(dim=-1).gather(1, torch.tensor(reply.token_ids)[:, None])[:, 0]


@pytest.mark.parametrize("kind", SUPPORTED)
def test_packed_passes_compute_what_plain_ones_do(kind: str) -> None:
    of = model(kind)
    assert supports(of)
    asked = [(prompt, SamplingParams(max_tokens=6, seed=seed)) for seed, (prompt, _) in enumerate(requests(6))]
    replies = play(decoder(of), asked)
    for (prompt, _), reply in zip(asked, replies, strict=True):
        torch.testing.assert_close(torch.tensor(reply.logprobs), plain_logprobs(of, prompt, reply), rtol=0, atol=2e-5)


def test_fused_attention_of_bfloat16_is_that_of_float32_up_to_rounding() -> None:
    of = model().bfloat16()
    asked = requests(24)
    replies = play(decoder(of), asked)
    of.float()
    gaps = torch.cat(
        [
            torch.tensor(reply.logprobs) - plain_logprobs(of, prompt, reply)
            for (prompt, one), reply in zip(asked, replies, strict=True)
            if one.temperature == 1
        ]
    )
    assert len(gaps) > 30
    assert gaps.abs().mean() < 0.2  # query heads with keys of another head: above 3


# --- who joins and leaves ---------------------------------------------------------------------------------------------


def test_a_reply_that_is_done_leaves_and_the_next_one_takes_its_place() -> None:
    by = decoder(most=2)
    asked = [([1, 2, 3], SamplingParams(max_tokens=length, seed=length)) for length in (30, 3, 27)]
    assert [len(reply.token_ids) for reply in play(by, asked)] == [30, 3, 27]
    assert by.passes == 30  # in batches of two: 57


def test_the_few_that_are_left_move_to_the_first_slots() -> None:
    by = decoder()
    asked = [([1, 2, 3], SamplingParams(max_tokens=2, seed=seed)) for seed in range(9)]
    long = ([4, 5, 6], SamplingParams(max_tokens=20, seed=9))
    for each in asked:
        by.join(*each, abandoned=lambda: False)
    last = by.join(*long, abandoned=lambda: False)
    assert last.slot == 9
    generations = dict(step for _ in range(20) for step in by.step())
    assert last.slot == 0
    assert [generations[last]] == play(decoder(), [long])


def test_an_abandoned_reply_ends_at_once_as_aborted() -> None:
    by, gone = decoder(), list[bool]()
    leaving = by.join([1, 2], SamplingParams(max_tokens=50), abandoned=lambda: bool(gone))
    by.step()
    gone.append(True)
    ((reply, generation),) = by.step()
    assert (reply, generation.finish, len(generation.token_ids)) == (leaving, FinishReason.ABORT, 1)
    assert (by.replies, by.passes) == ([], 1)


def test_slots_are_taken_from_those_idle_the_longest() -> None:
    slots = Slots(most=2)
    for name in ("a", "b"):
        slots.take([1, 2, 3], name)
    slots.release(1, (1, 2, 3))
    slots.release(0, (1, 2, 3))
    assert slots.take([9], "c") == (1, 0)  # of b
    assert slots.take([1, 2, 3, 4], "a") == (0, 3)


# --- the sampler ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    root = tmp_path_factory.mktemp("policy")
    qwen3().save_pretrained(root)
    tokenizer().save_pretrained(root)
    return str(root)


def test_readings_and_measures_are_served_while_replies_are_under_way(folder: str) -> None:
    sampler = TransformersSampler(folder)

    async def both() -> tuple[bool, Sequence[float]]:
        reply = asyncio.create_task(sampler.sample([5, 6], SamplingParams(max_tokens=1000)))
        measured = await sampler.score([5, 6], [7, 8])
        unfinished = not reply.done()
        reply.cancel()
        return unfinished, measured

    unfinished, measured = asyncio.run(both())
    assert unfinished
    assert len(measured) == 2
    sampler.close()


def test_new_weights_drop_keys_and_values(folder: str, tmp_path: Path) -> None:
    """Pitfall 24: the same prompt, before and after, and as a sampler answers that never had other weights."""
    sampler, other = TransformersSampler(folder), qwen3(seed=1)
    asked = ([5, 6, 7], SamplingParams(max_tokens=8, trajectory="g/0"))
    before = asyncio.run(sampler.sample(*asked))
    sampler.update([(name, tensor.detach().clone()) for name, tensor in other.named_parameters()], 1)
    after = asyncio.run(sampler.sample(*asked))
    assert after.logprobs != before.logprobs
    sampler.sleep(keep_weights=True)
    assert asyncio.run(sampler.sample(*asked)) == after
    sampler.close()
    other.save_pretrained(tmp_path)
    tokenizer().save_pretrained(tmp_path)
    fresh = TransformersSampler(str(tmp_path))
    assert asyncio.run(fresh.sample(*asked)) == after
    fresh.close()


def test_after_logits_that_are_not_numbers_good_weights_work_again(folder: str) -> None:
    sampler = TransformersSampler(folder)
    asked = ([5, 6, 7], SamplingParams(max_tokens=8, trajectory="g/0"))
    before = asyncio.run(sampler.sample(*asked))
    good = [(name, tensor.detach().clone()) for name, tensor in qwen3().named_parameters()]
    sampler.update([(name, tensor * math.nan) for name, tensor in good], 1)
    with pytest.raises(SamplerError, match="not numbers"):
        asyncio.run(sampler.sample(*asked))
    sampler.update(good, 2)
    assert asyncio.run(sampler.sample(*asked)) == before
    sampler.close()


def test_models_that_see_a_window_are_sampled_in_padded_batches(tmp_path: Path) -> None:
    model("mistral", sliding_window=8).save_pretrained(tmp_path)
    sampler = TransformersSampler(str(tmp_path))
    assert sampler.describe().startswith("transformers: padded batches")
    asked = ([*range(20)], SamplingParams(max_tokens=5))
    assert len(asyncio.run(sampler.sample(*asked)).token_ids) == 5
    sampler.close()
