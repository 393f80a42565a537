"""The scripted sampler treats a script as a model's output would be treated."""

import asyncio
import subprocess
import sys

import pytest

from condensegrpo.core.errors import SamplerError
from condensegrpo.core.trajectory import FinishReason, Generation, SamplingParams
from condensegrpo.samplers.scripted import ScriptedSampler


def ask(sampler: ScriptedSampler, prompt: list[int], params: SamplingParams) -> Generation:
    return asyncio.run(sampler.sample(prompt, params))


FIVE = SamplingParams(max_tokens=5, stop_ids=(2,))


def test_replies_of_a_list_come_in_order() -> None:
    sampler = ScriptedSampler([[5, 6, 2], [7, 2]])
    assert ask(sampler, [1], FIVE).token_ids == (5, 6, 2)
    assert ask(sampler, [1], FIVE).token_ids == (7, 2)


def test_a_list_that_has_come_to_its_end_is_an_error_that_says_so() -> None:
    sampler = ScriptedSampler([[7, 2]])
    ask(sampler, [1], FIVE)
    with pytest.raises(SamplerError, match="prompt of 3 tokens: the script has no further reply"):
        ask(sampler, [1, 2, 3], FIVE)


def test_an_agent_is_a_function_of_the_prompt() -> None:
    sampler = ScriptedSampler(lambda prompt_ids: [prompt_ids[-1] + 1, 2])
    assert ask(sampler, [4, 8], FIVE).token_ids == (9, 2)
    assert ask(sampler, [8, 4], FIVE).token_ids == (5, 2)


def test_the_stop_id_stays_and_what_follows_it_goes() -> None:
    reply = ask(ScriptedSampler([[5, 2, 6, 2]]), [1], FIVE)
    assert (reply.token_ids, reply.finish) == ((5, 2), FinishReason.STOP)


def test_a_reply_is_cut_at_max_tokens_and_counts_as_cut() -> None:
    reply = ask(ScriptedSampler([[5, 6, 7, 8, 9, 2]]), [1], FIVE)
    assert (reply.token_ids, reply.finish) == ((5, 6, 7, 8, 9), FinishReason.LENGTH)


def test_a_stop_id_at_the_very_limit_is_a_stop() -> None:
    reply = ask(ScriptedSampler([[5, 6, 7, 8, 2]]), [1], FIVE)
    assert (reply.token_ids, reply.finish) == ((5, 6, 7, 8, 2), FinishReason.STOP)


def test_a_reply_that_ends_by_itself_stops_as_at_a_stop_string() -> None:
    reply = ask(ScriptedSampler([[5, 6]]), [1], FIVE)
    assert (reply.token_ids, reply.finish) == ((5, 6), FinishReason.STOP)


def test_every_token_has_the_constant_logprob() -> None:
    assert ask(ScriptedSampler([[5, 6, 2]], logprob=-0.25), [1], FIVE).logprobs == (-0.25, -0.25, -0.25)
    with pytest.raises(ValueError, match="at most 0"):
        ScriptedSampler([], logprob=0.1)


def test_seconds_delay_each_reply_on_its_own_and_keep_the_order_of_the_calls() -> None:
    sampler = ScriptedSampler([[5, 2], [6, 2]], seconds=lambda prompt_ids: 0.05 if prompt_ids == (1,) else 0.0)
    arrived: list[tuple[int, ...]] = []

    async def one(prompt: list[int]) -> None:
        arrived.append((await sampler.sample(prompt, FIVE)).token_ids)

    async def both() -> None:
        await asyncio.gather(one([1]), one([3]))

    asyncio.run(both())
    assert arrived == [(6, 2), (5, 2)]  # the first call got the first reply, but later


def test_what_an_agent_raises_passes_through() -> None:
    def agent(prompt_ids: tuple[int, ...]) -> list[int]:
        raise LookupError("lost the script")

    with pytest.raises(LookupError, match="lost the script"):
        ask(ScriptedSampler(agent), [1], FIVE)


def test_update_weights_takes_the_version_and_reads_every_tensor() -> None:
    sampler = ScriptedSampler([])
    read: list[str] = []

    def tensors() -> object:
        for name in ("a", "b"):
            read.append(name)
            yield name, 0.0

    assert sampler.version == 0
    sampler.update(tensors(), 7)  # type: ignore[arg-type]  # any values will do
    assert (sampler.version, read) == (7, ["a", "b"])
    sampler.close()
    sampler.close()


def test_it_needs_no_torch() -> None:
    code = "import sys, condensegrpo.samplers.scripted; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
