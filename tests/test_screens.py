"""The task screens: its pictures, its pages, its expert, and layouts that are held out."""

import asyncio
import io
from collections.abc import Iterator

import pytest
from PIL import Image

from condensegrpo.core.condenser import Request
from condensegrpo.core.messages import History, MediaPart, Message, Unit
from condensegrpo.core.protocols.environment import Step
from condensegrpo.core.protocols.task import Problem
from condensegrpo.studies.tasks.screens import APPS, INSTRUCTION, NO_ACTION, Desktop, Screens, drawn

TASK = Screens(apps=2, grid=8, cell=10, scrolled=0.5, eval_problems=16)


def desktop(**changes: object) -> Desktop:
    """Mail at the cell (1, 2), files at (3, 4), the form at (5, 6), OK at (7, 7); texts begin at (2, 0)."""
    values: dict[str, object] = {
        "grid": 8,
        "cell": 10,
        "layout": {"mail": (1, 2), "files": (3, 4), "form": (5, 6), "ok": (7, 7), "text": (2, 0)},
        "codes": {"mail": "47", "files": "19", "receipt": "82"},
        "below": frozenset({"files"}),
        "requested": "mail",
    }
    return Desktop(**(values | changes))  # type: ignore[arg-type]  # of mixed types


def said(text: str) -> Message:
    return Message(role="assistant", content=text)


def played(problem: Problem) -> Iterator[tuple[str, Step]]:
    """The replies of the expert, with what the environment answers."""
    environment, expert = TASK.environment(problem), TASK.expert(problem)
    step = Step()
    while not step.done:
        reply = expert.reply(())
        step = asyncio.run(environment.step(said(reply)))
        yield reply, step


def cells(data: bytes) -> dict[tuple[int, int], bytes]:
    """The pixels of every cell of ten pixels."""
    picture = Image.open(io.BytesIO(data))
    assert (picture.size, picture.mode) == ((80, 80), "RGB")
    boxes = {
        (column, row): (10 * column, 10 * row, 10 * column + 10, 10 * row + 10)
        for column in range(8)
        for row in range(8)
    }
    return {cell: picture.crop(box).tobytes() for cell, box in boxes.items()}


def test_the_expert_solves_every_problem() -> None:
    for problem in (*TASK.problems("eval"), *TASK.problems("train")[:16]):
        *_, (_, last) = played(problem)
        assert (last.done, last.answer) == (True, problem.answer)


def test_an_episode_of_the_expert() -> None:
    problem = next(each for each in TASK.problems("eval") if each.data["below"] == ["files"])
    codes, layout, requested = problem.data["codes"], problem.data["layout"], problem.data["requested"]

    def click(name: str) -> str:
        return "{} click({}, {})".format(name, *(10 * place + 5 for place in layout[name]))

    def spaced(name: str) -> str:
        return " ".join(codes[name])

    steps = list(played(problem))
    assert [reply for reply, _ in steps] == [
        "look()",
        click("mail"),
        f"mail {spaced('mail')} {click('files')}",
        f"mail {spaced('mail')} files scroll(down)",
        f"mail {spaced('mail')} files {spaced('files')} {click('form')}",
        f"{requested} {spaced(requested)} type( {spaced(requested)} )",
        click("ok"),
        f"answer( {spaced('receipt')} )",
    ]
    for _, step in steps[:-1]:
        (message,) = step.observations
        (part,) = message.parts
        assert isinstance(part, MediaPart)
        assert part.type == "image/png"


def test_a_symbol_stays_within_its_cell() -> None:
    empty, full = (cells(drawn(8, 10, symbols)) for symbols in ((), (((3, 4), ("M", "#000000", "#ffffff")),)))
    assert {cell for cell in full if full[cell] != empty[cell]} == {(3, 4)}


def test_a_code_is_visible_on_the_page_of_its_app_only() -> None:
    world = desktop()
    home = cells(world.picture())
    world.click(15, 25)
    mail = cells(world.picture())
    assert {cell for cell in mail if mail[cell] != home[cell]} == {(0, 0), (2, 0), (3, 0)}  # its name and two digits
    other = desktop(codes={"mail": "46", "files": "19", "receipt": "82"})
    assert cells(other.picture()) == home
    other.click(15, 25)
    assert {cell for cell, pixels in cells(other.picture()).items() if pixels != mail[cell]} == {(3, 0)}


def test_some_codes_are_below_the_visible_part() -> None:
    world = desktop()
    world.click(35, 45)
    above = cells(world.picture())
    world.scroll(down=True)
    below = cells(world.picture())
    assert {cell for cell in above if above[cell] != below[cell]} == {(2, 0), (3, 0)}
    world.scroll(down=False)
    assert cells(world.picture()) == above
    world.click(15, 25)
    before = world.picture()
    world.scroll(down=True)
    assert world.picture() == before


@pytest.mark.parametrize(
    ("typed", "page"),
    [("4 7", "receipt"), ("47", "receipt"), ("the code 4 7 !", "receipt"), ("19", "form"), ("", "form")],
)
def test_the_form_gives_a_receipt_for_the_code_that_it_asks_for(typed: str, page: str) -> None:
    world = desktop()
    world.click(55, 65)
    world.type(typed)
    world.click(75, 75)
    assert world.page == page


def test_ok_and_typing_have_an_effect_in_the_form_only() -> None:
    world = desktop()
    world.type("47")
    world.click(75, 75)
    assert (world.page, world.typed) == ("desktop", "")
    world.click(25, 5)  # the first digit of a code is no button
    assert world.page == "desktop"


@pytest.mark.parametrize(
    "reply",
    ["click (15,25)", "I see mail at the left. click(15, 25)", "click(1, 2) click(19, 29)", "click(15, 25)\n"],
)
def test_the_action_is_at_the_end_of_a_reply(reply: str) -> None:
    world = desktop()
    environment = type(TASK.environment(TASK.problems("eval")[0]))(desktop=world)
    asyncio.run(environment.step(said(reply)))
    assert world.page == "mail"


@pytest.mark.parametrize("reply", ["", "click(15, 25) and wait", "tap(15, 25)", "click 15 25"])
def test_a_reply_without_an_action_is_told_so(reply: str) -> None:
    environment = TASK.environment(TASK.problems("eval")[0])
    step = asyncio.run(environment.step(said(reply)))
    assert (step.observations, step.done) == ((Message(role="user", content=NO_ACTION),), False)


@pytest.mark.parametrize("reply", ["click(here)", "click(99999, 99999)", "scroll(left)", "type()", "look()"])
def test_an_action_without_an_effect_shows_the_same_picture(reply: str) -> None:
    environment = TASK.environment(TASK.problems("eval")[0])
    first, second = (asyncio.run(environment.step(said(action))).observations for action in ("look()", reply))
    assert first == second


def test_no_layout_of_the_evaluation_is_in_training() -> None:
    def layouts(problems: object) -> set[str]:
        return {str(sorted(problem.data["layout"].items())) for problem in problems}  # type: ignore[attr-defined]  # data is JSON of any type

    held_out = layouts(TASK.problems("eval"))
    assert len(held_out) == 16
    assert not held_out & layouts(TASK.problems("train")[:500])
    assert TASK.problems("train")[7] == TASK.problems("train")[7]


def test_the_corpus_has_every_word_of_the_expert_and_of_placeholders() -> None:
    words = {word for text in TASK.corpus() for word in text.split()}
    replies = " ".join(reply for problem in TASK.problems("train")[:50] for reply, _ in played(problem))
    assert set(replies.split()) <= words
    assert set(f"{INSTRUCTION} {NO_ACTION} [picture of turn 3 omitted: 64 tokens]".split()) <= words


def test_a_caption_of_the_expert_has_the_codes_so_far() -> None:
    problem = next(each for each in TASK.problems("eval") if not each.data["below"])
    expert = TASK.expert(problem)
    request = Request(units=(Unit(turn=0, reply=said("look()")),), instruction="sum up")
    assert expert.write(request) == "none"
    for _ in range(3):
        expert.reply(History(pinned=()).messages)
    assert expert.write(request) == f"mail {' '.join(problem.data['codes']['mail'])}"


def test_there_are_as_many_apps_as_names() -> None:
    assert len(Screens(apps=len(APPS), eval_problems=1).problems("eval")[0].data["codes"]) == len(APPS) + 1
