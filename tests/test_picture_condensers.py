"""Condensers of pictures: which go, what stands in their place, what the policy writes about them, and the budget."""

import asyncio
import io
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from conformance import PINNED, Case, check_account, check_atomic, check_budget, statuses, turns
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from talk import engine
from vision_models import image_processor, vision_config, vision_tokenizer

from condensegrpo.condensers.images import INSTRUCTION
from condensegrpo.core.condenser import Budget, Condensed, Request, WrittenSummary, with_tokens
from condensegrpo.core.messages import Caption, History, MediaPart, Message, TextPart, Unit, flatten
from condensegrpo.core.protocols.tool import ToolResult
from condensegrpo.core.trajectory import FinishReason, SpanStatus, StopReason, Trajectory
from condensegrpo.episodes.episode import run_episode
from condensegrpo.episodes.render import Renderer
from condensegrpo.episodes.settings import Limits
from condensegrpo.samplers.scripted import ScriptedSampler
from condensegrpo.storage.media import MediaFolder
from condensegrpo.studies.tasks.screens import Screens
from condensegrpo.vision.processor import PictureProcessor, load_picture_processor

PICTURE_TOKENS = 200
MASK, SCALE, CAPTION = "image_mask", "image_scale", "image_caption"


def count(messages: Sequence[Message]) -> int:
    """Three tokens a prompt, four a message, one a character and 200 a picture."""
    texts = sum(len(part.text) for message in messages for part in message.parts if isinstance(part, TextPart))
    return 3 + 4 * len(messages) + texts + PICTURE_TOKENS * sum(len(message.media) for message in messages)


def png(color: int, width: int = 8, height: int = 6) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (width, height), (color, 0, 0)).save(file, "PNG")
    return file.getvalue()


def screen(turn: int, text: str = "", pictures: int = 1) -> Unit:
    """A click that was answered by pictures and a text; every picture is another one."""
    shown = tuple(MediaPart.of(png(9 * turn + number), "image/png") for number in range(pictures))
    return Unit(
        turn=turn,
        reply=Message(role="assistant", content="click"),
        results=(Message(role="user", content=(TextPart(text=text), *shown)),),
    )


def past(*units: Unit) -> History:
    return History(pinned=PINNED, units=units)


def condense(
    name: str, history: History, tokens: int = 10_000, media: MediaFolder | None = None, **options: object
) -> Condensed:
    return asyncio.run(Case(name, options).build().condense(seen(history), budget(tokens, media)))


def seen(history: History, tokens: int = PICTURE_TOKENS) -> History:
    """The history with the tokens of its units, as the engine counts them."""
    units = [
        replace(unit, media_tokens=tokens * sum(len(message.media) for message in unit.results))
        for unit in history.units
    ]
    return with_tokens(replace(history, units=tuple(units)), count)


def budget(tokens: int, media: MediaFolder | None = None, text: str = "the code is 4 7") -> Budget:
    async def write(request: Request) -> WrittenSummary:
        return WrittenSummary(text=text, finish=FinishReason.STOP if text != "cut" else FinishReason.LENGTH)

    return Budget(tokens=tokens - count(PINNED), prompt_tokens=tokens + 500, write=write, media=media)


def observed(condensed: Condensed) -> list[str]:
    """The observation of every unit; pictures as their turns' letters."""
    return [
        "".join("#" if isinstance(part, MediaPart) else part.text for part in unit.results[-1].parts)
        for unit in condensed.units
    ]


def four() -> History:
    """Four units with a picture each."""
    return past(*(screen(turn) for turn in range(4)))


@pytest.mark.parametrize(
    ("options", "letters"),
    [
        ({}, "rrrk"),
        ({"keep": 2}, "rrkk"),
        ({"keep": 0}, "rrrr"),
        ({"keep": 1, "keep_first": 1}, "krrk"),
        ({"keep": 3, "keep_first": 3}, "kkkk"),
    ],
)
def test_the_newest_and_the_first_pictures_stay(options: dict[str, object], letters: str) -> None:
    assert statuses(four(), condense(MASK, four(), **options), count) == letters


def test_units_without_pictures_do_not_count_among_those_that_are_kept() -> None:
    history = past(screen(0), screen(1), screen(2, "done", pictures=0))
    assert observed(condense(MASK, history, keep=1)) == ["[picture of turn 0 omitted: 200 tokens]", "#", "done"]


def test_a_line_says_how_many_tokens_the_picture_had_and_texts_stay() -> None:
    history = past(screen(3, "page: ", pictures=2), screen(4))
    line = "[picture of turn 3 omitted: 200 tokens]"
    found = condense(MASK, history)
    assert observed(found) == [f"page: {line}{line}", "#"]
    assert found.reason == "omitted the pictures of 1 of 2 units"


def test_a_thousand_tokens_have_a_comma() -> None:
    history = seen(past(screen(3), screen(4)))
    wide = replace(history, units=tuple(replace(unit, tokens=1300, media_tokens=1240) for unit in history.units))
    found = asyncio.run(Case(MASK, {}).build().condense(wide, budget(10_000)))
    assert observed(found)[0] == "[picture of turn 3 omitted: 1,240 tokens]"


def test_over_budget_kept_pictures_go_the_oldest_first_and_then_whole_units() -> None:
    whole = count(flatten(PINNED, four().units))
    line = len("[picture of turn 0 omitted: 200 tokens]")
    unit, masked = 4 + 5 + 4 + 200, 4 + 5 + 4 + line
    assert whole == 23 + 4 * unit
    tokens = (whole, whole - 1, 23 + 3 * masked + unit, 23 + 3 * masked + unit - 1, 23 + unit)
    found = [statuses(four(), condense(MASK, four(), most, keep=4), count) for most in tokens]
    assert found == ["kkkk", "rkkk", "rrrk", "drrk", "dddk"]


def test_only_omitting_drops_nothing() -> None:
    found = condense(MASK, four(), 100, drop_oldest=False)
    assert statuses(four(), found, count) == "rrrk"


@settings(max_examples=15)
@given(
    pictures=st.lists(st.integers(0, 2), max_size=12),
    tokens=st.integers(0, 3000),
    name=st.sampled_from([MASK, CAPTION]),
    keep=st.integers(0, 3),
)
def test_the_contract_of_condensers_holds_with_pictures(pictures: list[int], tokens: int, name: str, keep: int) -> None:
    """Order, whole units, true accounts, the budget; the same again."""
    history = past(*(screen(2 * turn, "x", number) for turn, number in enumerate(pictures)))
    found = condense(name, history, tokens, keep=keep)
    assert condense(name, history, tokens, keep=keep) == found
    check_account(history, found, count)
    check_atomic(history, found)
    if count(flatten(history.pinned, found.units)) > tokens:
        check_budget(name, history, found, tokens, count)


def test_scaled_pictures_are_stored_smaller_and_made_once(tmp_path: Path) -> None:
    media = MediaFolder(tmp_path)
    for unit in four().units:
        media.write(unit.results[0].media[0])
    found = condense(SCALE, four(), media=media, scale=0.5, keep=2)
    assert statuses(four(), found, count) == "rrkk"
    for before, after in zip(four().units, found.units, strict=True):
        (picture,) = after.results[0].media
        size = Image.open(io.BytesIO(media.read(picture.sha256))).size
        assert size == ((4, 3) if picture != before.results[0].media[0] else (8, 6))
        assert picture.data is None or picture == before.results[0].media[0]
    assert found.reason == "scaled the pictures of 2 of 4 units"
    assert len(list(tmp_path.iterdir())) == 7  # two that are shown, one for a tighter budget
    assert condense(SCALE, four(), media=media, scale=0.5, keep=2) == found


def test_scaling_needs_the_bytes() -> None:
    with pytest.raises(ValueError, match="the budget has no store"):
        condense(SCALE, four())


def test_a_pipeline_mixes_pictures_and_texts(tmp_path: Path) -> None:
    history = past(*(screen(turn, "text " * 20) for turn in range(4)))
    stages = [
        {"name": MASK, "over": 0, "options": {"drop_oldest": False}},
        {"name": "observation_mask", "over": 0, "options": {"keep": 2}},
        {"name": "last_k", "over": 0, "options": {"keep_last": 3}},
    ]
    found = condense("pipeline", history, stages=stages)
    assert statuses(history, found, count) == "drrk"
    # the second stage omits what the first left: its line counts the text with the line of the picture
    assert observed(found)[0] == "[turn 1, observation omitted: 143 tokens]"
    assert observed(found)[1] == "text " * 20 + "[picture of turn 2 omitted: 200 tokens]"
    assert found.reason.startswith("image_mask: omitted the pictures of 3 of 4 units")


# --- captions ---------------------------------------------------------------------------------------------------------


def test_the_policy_writes_about_a_picture_before_it_is_omitted() -> None:
    requests: list[Request] = []

    async def write(request: Request) -> WrittenSummary:
        requests.append(request)
        return WrittenSummary(text="the code\nis 4 7", finish=FinishReason.STOP)

    condenser = Case(CAPTION, {"keep": 1}).build()
    history, asked = past(), replace(budget(10_000), write=write)
    shown = []
    for turn in range(4):  # as the engine does it
        history = seen(history.add(screen(turn)))
        found = asyncio.run(condenser.condense(history, asked))
        history = history.with_captions(found.captions)
        shown.append(observed(found))
    line = "[picture of turn {} omitted: 200 tokens] the code is 4 7"
    assert shown == [
        ["#"],
        [line.format(0), "#"],
        [line.format(0), line.format(1), "#"],
        [*map(line.format, range(3)), "#"],
    ]
    assert [caption.turn for caption in history.captions] == [0, 1, 2]
    # a request shows what the last prompt showed and the newest unit
    assert [
        [
            "".join("#" if isinstance(part, MediaPart) else part.text for part in unit.results[0].parts)
            for unit in request.units
        ]
        for request in requests
    ][1:] == [
        [line.format(0), "#", "#"],
        [line.format(0), line.format(1), "#", "#"],
    ]
    assert requests[1].instruction == (
        "Write one line with what you need later of the pictures of turn 1: they will be omitted."
    )


def test_recall_shows_an_omitted_picture_again() -> None:
    history = four()
    masked = replace(history.units[0], results=(Message(role="user", content="[picture of turn 0 omitted]"),))
    (recall,) = Case("recall", {}).build().tools()
    found = asyncio.run(recall.call({"turn": 0}, replace(history, shown=(masked,))))
    assert found == ToolResult(text="[recalled from turn 0]\n", media=history.units[0].results[0].media)


def test_pictures_that_leave_together_get_one_text_with_the_last_of_them() -> None:
    found = condense(CAPTION, four(), keep=1)
    line = "[picture of turn {} omitted: 200 tokens]"
    assert observed(found) == [line.format(0), line.format(1), f"{line.format(2)} the code is 4 7", "#"]
    assert found.captions == (Caption(turn=2, text="the code is 4 7"),)


@pytest.mark.parametrize(
    ("text", "why"), [("cut", "cut off by its length"), (" ", "it is empty"), ("x" * 300, "not shorter")]
)
def test_a_text_that_cannot_be_used_is_rejected_and_not_requested_again(text: str, why: str) -> None:
    condenser, history = Case(CAPTION, {}).build(), seen(past(screen(0), screen(1)))
    found = asyncio.run(condenser.condense(history, budget(10_000, text=text)))
    assert (len(found.rejected), found.captions) == (1, (Caption(turn=0, text=""),))
    assert why in found.rejected[0]
    assert observed(found) == ["[picture of turn 0 omitted: 200 tokens]", "#"]
    again = asyncio.run(condenser.condense(history.with_captions(found.captions), budget(10_000)))
    assert (again.units, again.rejected, again.captions) == (found.units, (), ())


def test_a_request_that_does_not_fit_is_not_made() -> None:
    history = seen(past(screen(0), screen(1)))
    tight = budget(count(flatten(PINNED, history.units)) - 100)
    found = asyncio.run(Case(CAPTION, {}).build().condense(history, tight))
    assert (found.rejected, found.captions) == ((), (Caption(turn=0, text=""),))
    assert turns(found) == [0, 1]


# --- in the engine ----------------------------------------------------------------------------------------------------

TASK = Screens(apps=2, grid=8, cell=4, scrolled=0.0, eval_problems=4)  # 32 × 32 pixels: 16 tokens and two edges


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> Renderer:
    """The renderer of a model that sees, with the words of the task screens."""
    folder = tmp_path_factory.mktemp("seeing")
    words = vision_tokenizer("qwen2_5_vl", corpus=[*TASK.corpus(), INSTRUCTION.format(turns="turn")], kind="words")
    words.save_pretrained(folder)
    vision_config("qwen2_5_vl", words).save_pretrained(folder)
    image_processor("qwen2_5_vl").save_pretrained(folder)
    return Renderer(words, pictures=load_picture_processor(str(folder), MediaFolder(folder / "media")))


def played(seeing: Renderer, name: str, **options: object) -> Trajectory:
    """An episode of the expert under a condenser that is called before every turn."""
    problem = TASK.problems("eval")[0]
    parts = replace(
        engine(ScriptedSampler(lambda _: [])),  # the expert replies in its place
        renderer=seeing,
        expert=TASK.expert(problem),
        condenser=Case(name, options).build(),
        condenser_name=name,
        limits=Limits(max_turns=12, max_context_tokens=1000, max_output_tokens=40),
    )
    episode = run_episode(
        problem, environment=TASK.environment, engine=parts, group_id="g", sample=0, seed=lambda number: number
    )
    return asyncio.run(episode)


def test_the_engine_shows_one_picture_and_lines_for_the_others(seeing: Renderer) -> None:
    episode = played(seeing, MASK, keep=1)
    assert (episode.stop, episode.answer) == (StopReason.ANSWERED, episode.ground_truth)
    assert [len(turn.media) for turn in episode.turns] == [0, 1, 1, 1, 1, 1, 1]
    assert episode.turns[3].media == tuple(part.sha256 for part in episode.turns[2].observations[0].media)
    texts = [message.text for message in episode.turns[3].context if message.role == "user"][1:-1]
    assert texts == [f"[picture of turn {turn} omitted: 18 tokens]" for turn in (0, 1)]
    assert [span.status for span in episode.turns[3].condensation.spans] == [SpanStatus.REWRITTEN, SpanStatus.KEPT]  # type: ignore[union-attr]  # not None
    assert [turn.condensation is not None for turn in episode.turns] == [False, False, *[True] * 5]
    kept = played(seeing, "full")
    assert [len(turn.media) for turn in kept.turns] == [0, 1, 2, 3, 4, 5, 6]
    assert all(turn.condensation is None for turn in kept.turns)


def test_the_engine_trains_the_texts_about_pictures(seeing: Renderer) -> None:
    episode = played(seeing, CAPTION, keep=1)
    assert (episode.stop, episode.rejected) == (StopReason.ANSWERED, ())
    kinds = "".join(turn.kind[0] for turn in episode.turns)
    assert kinds == "aacacacacaca"
    first = episode.turns[2]
    assert first.prompt_ids[: len(episode.turns[1].prompt_ids)] == episode.turns[1].prompt_ids
    assert len(first.media) == 2  # the picture that leaves and the newest
    codes = TASK.problems("eval")[0].data["codes"]
    mail, files = (f"{app} {' '.join(codes[app])}" for app in ("mail", "files"))
    lines = [message.text for message in episode.turns[-1].context if "omitted" in message.text]
    written = ["none", mail, f"{mail} {files}", f"{mail} {files}", f"{mail} {files}"]
    turns_of_pictures = [0, 1, 3, 5, 7]
    assert lines == [
        f"[picture of turn {turn} omitted: 18 tokens] {text}"
        for turn, text in zip(turns_of_pictures, written, strict=True)
    ]


def test_the_engine_shows_scaled_pictures(seeing: Renderer) -> None:
    episode = played(seeing, SCALE, keep=1)
    assert (episode.stop, episode.detail) == (StopReason.ANSWERED, "")
    assert [len(turn.media) for turn in episode.turns] == [0, 1, 2, 3, 4, 5, 6]
    last = episode.turns[-1]
    pictures = seeing.pictures
    assert isinstance(pictures, PictureProcessor)
    assert [pictures.picture_tokens(sha256) for sha256 in last.media] == [4, 4, 4, 4, 4, 16]
