"""The attention scorer on real histories and real models of a few thousand parameters."""

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from talk import END, FORGETS_THINKING, tokenizer
from transformers import Qwen3Config, Qwen3ForCausalLM

from condensegrpo.attention.scorer import MIN_TOKENS, AttentionScorer, pages, split_history
from condensegrpo.core.errors import SamplerError
from condensegrpo.core.messages import History, Message, Unit, flatten
from condensegrpo.core.protocols.sampler import AttentionQuery, TokenAttention
from condensegrpo.episodes.render import Renderer
from condensegrpo.samplers.transformers import TransformersSampler

POSITIONS = 1024


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    shape: dict[str, Any] = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "initializer_range": 0.5,
    }
    config = Qwen3Config(vocab_size=len(tokenizer()), max_position_embeddings=POSITIONS, eos_token_id=END, **shape)
    Qwen3ForCausalLM(config).save_pretrained(path)
    tokenizer().save_pretrained(path)
    return str(path)


@pytest.fixture(scope="module")
def model(folder: str) -> Iterator[TransformersSampler]:
    sampler = TransformersSampler(folder)
    yield sampler
    sampler.close()


class Recording:
    """A sampler that records every query."""

    def __init__(self, sampler: TransformersSampler) -> None:
        self.sampler = sampler
        self.version = 0
        self.queries: list[AttentionQuery] = []

    async def attend(self, query: AttentionQuery) -> TokenAttention:
        self.queries.append(query)
        return await self.sampler.attend(query)


def history(*replies: str, question: str = "which one?") -> History:
    return History(
        pinned=(Message(role="system", content="be brief"), Message(role="user", content=question)),
        units=tuple(
            Unit(
                turn=turn,
                reply=Message(role="assistant", content=reply),
                results=(Message(role="user", content=f"seen {turn}"),),
            )
            for turn, reply in enumerate(replies)
        ),
    )


def text(ids: tuple[int, ...]) -> str:
    return str(tokenizer().decode(list(ids)))


def test_every_unit_has_a_score_and_the_newest_has_zero(model: TransformersSampler) -> None:
    past = history("hello", "one " * 9, "two", "hello hello")
    (scores,) = asyncio.run(AttentionScorer(model, Renderer(tokenizer())).score([past], 512))
    assert len(scores) == 4
    assert scores[3] == 0
    assert any(score > 0 for score in scores[:3])
    assert all(0 <= score < 100 for score in scores)


def test_scores_do_not_depend_on_the_batch(model: TransformersSampler) -> None:
    pasts = [history("hello", "one", "two"), history(*["one two hello"] * 7), history("x", "y")]
    together = asyncio.run(AttentionScorer(model, Renderer(tokenizer())).score(pasts, 512))
    for past, found in zip(pasts, together, strict=True):
        (alone,) = asyncio.run(AttentionScorer(model, Renderer(tokenizer())).score([past], 512))
        assert found == pytest.approx(alone, abs=1e-4)


@pytest.mark.parametrize("past", [history(), history("hello")])
def test_histories_of_fewer_than_two_units_are_not_read(past: History, model: TransformersSampler) -> None:
    recording = Recording(model)
    (scores,) = asyncio.run(AttentionScorer(recording, Renderer(tokenizer())).score([past], 512))
    assert scores == (0.0,) * len(past.units)
    assert recording.queries == []


def test_the_window_is_the_end_of_the_question_and_of_the_last_output(model: TransformersSampler) -> None:
    recording = Recording(model)
    past = history("hello", "one two", question="a b c d e f g")
    asyncio.run(AttentionScorer(recording, Renderer(tokenizer()), window=6).score([past], 512))
    (query,) = recording.queries
    assert text(query.question_ids) == "f g"
    assert text(tuple(query.prompt_ids[place] for place in query.positions)) == "two"
    assert text(query.calibration_ids) == "N/A"


def test_the_prompt_is_the_prompt_of_the_history(model: TransformersSampler) -> None:
    recording, renderer = Recording(model), Renderer(tokenizer())
    past = history("hello", "one two", "x<|im_end|>y")
    asyncio.run(AttentionScorer(recording, renderer).score([past], 512))
    assert text(recording.queries[0].prompt_ids) == text(renderer.prompt(past.messages))


def test_scores_are_cached_until_the_weights_change(model: TransformersSampler) -> None:
    recording = Recording(model)
    scorer = AttentionScorer(recording, Renderer(tokenizer()))
    past = history("hello", "one", "two")
    first = asyncio.run(scorer.score([past], 512))
    assert asyncio.run(scorer.score([past], 512)) == first
    assert len(recording.queries) == 1
    recording.version = 1
    asyncio.run(scorer.score([past], 512))
    assert len(recording.queries) == 2


def test_trajectories_with_equal_histories_share_a_reading(model: TransformersSampler) -> None:
    """Siblings often agree for some turns; a history that differs only in an old unit has scores of its own."""
    recording = Recording(model)
    scorer = AttentionScorer(recording, Renderer(tokenizer()))
    pasts = [history("hello", "one", "two"), history("hello", "one", "two"), history("other", "one", "two")]
    first, second, other = asyncio.run(scorer.score(pasts, 512))
    assert first == second != other
    assert len(recording.queries) == 2


def test_the_tokens_of_all_pages_grow_linearly_with_the_history(model: TransformersSampler) -> None:
    read = {}
    for units in (20, 40, 80):
        recording = Recording(model)
        past = history(*["one two hello"] * units)
        (scores,) = asyncio.run(AttentionScorer(recording, Renderer(tokenizer())).score([past], 300))
        assert len(scores) == units
        assert max(query.length for query in recording.queries) <= 303  # the calibration stands beside the question
        read[units] = sum(query.length for query in recording.queries)
    assert read[40] / read[20] == pytest.approx(2, rel=0.15)
    assert read[80] / read[40] == pytest.approx(2, rel=0.15)


def test_a_page_beyond_the_models_positions_is_an_error_with_the_numbers(model: TransformersSampler) -> None:
    past = history(*["one two hello " * 20] * 20)
    with pytest.raises(SamplerError, match=rf"has {POSITIONS} positions"):
        asyncio.run(AttentionScorer(model, Renderer(tokenizer())).score([past], 4 * POSITIONS))


# --- pages --------------------------------------------------------------------------------------------------------


def cut(past: History, room: int) -> list[Any]:
    return list(pages(split_history(past, Renderer(tokenizer()).content_spans(past.messages)), room))


def test_each_older_unit_is_on_one_page_and_the_newest_on_every_page() -> None:
    found = cut(history("a", "bb", "ccc", "dddd", "newest"), 180)
    assert [len(page.units) for page in found] == [3, 1]
    for page in found:
        assert "be brief" in text(page.ids)
        assert text(tuple(page.ids[place] for place in page.last_output)) == "newest"
        assert text(page.ids).endswith("<|im_start|>assistant\n")
        assert len(page.ids) <= 180
    assert text(tuple(found[1].ids[place] for place in found[1].units[0])) == "ddddseen 3"


def test_the_parts_of_a_split_history_in_order_are_the_prompt() -> None:
    past = history("a", "bb", "ccc")
    renderer = Renderer(tokenizer())
    parts = split_history(past, renderer.content_spans(past.messages))
    assert (*parts.pinned, *(token for unit in parts.units for token in unit.ids), *parts.end) == renderer.prompt(
        past.messages
    )


def test_a_unit_longer_than_a_page_is_read_from_its_beginning() -> None:
    found = cut(history("start" + "x" * 5000 + "stop", "a", "n"), 200)
    assert [len(page.units) for page in found] == [1, 1]
    assert len(found[0].ids) <= 200
    assert "start" in text(found[0].ids)
    assert "stop" not in text(found[0].ids)


def test_a_newest_unit_longer_than_a_page_leaves_room_for_older_units() -> None:
    past = history("a", "bb", "n" * 5000)
    found = cut(past, 200)
    assert [len(page.units) for page in found] == [2]
    assert len(found[0].ids) <= 200


def test_pinned_messages_that_fill_the_page_leave_the_minimum_for_each_unit() -> None:
    found = cut(history("a", "bb", "c", question="q" * 500), 100)
    assert sum(len(page.units) for page in found) == 2
    assert all(len(page.units[0]) > 0 for page in found)
    assert MIN_TOKENS == 16


# --- places of messages in a prompt ------------------------------------------------------------------------------


def test_located_returns_the_places_of_each_messages_content() -> None:
    past = history("hello <|im_end|> there", "", "one")
    located = Renderer(tokenizer()).content_spans(past.messages)
    said = [text(located.ids[span.start : span.stop]) for span in located.spans]
    assert said == [message.content for message in past.messages]


def test_located_excludes_content_that_the_template_omits() -> None:
    past = history("<think>long thoughts</think>short", "one")
    renderer = Renderer(tokenizer(FORGETS_THINKING))
    located = renderer.content_spans(past.messages)
    assert "long" not in text(located.ids)
    first_reply = located.spans[2]
    assert text(located.ids[first_reply.start : first_reply.stop]).endswith("short")


def test_located_returns_the_ids_of_the_prompt() -> None:
    past = history("hello", "one", "two words")
    renderer = Renderer(tokenizer())
    assert renderer.content_spans(past.messages).ids == renderer.prompt(flatten(past.pinned, past.units))
