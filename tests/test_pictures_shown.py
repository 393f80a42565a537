"""Pictures of stored trajectories: on a terminal, on the inspector's page, in DataFrames; those that are missing."""

import base64
import io
import re
from dataclasses import replace
from pathlib import Path

import pytest
from browsing import Watched, chromium
from builders import add_trajectory, condensation, scored, trajectory, turn, user
from PIL import Image
from rich.console import Console

from condensegrpo.core.messages import MediaPart, Message, TextPart
from condensegrpo.core.scored_trajectory import ScoredTrajectory
from condensegrpo.display.inspector import shown
from condensegrpo.display.trajectory_view import TerminalPicture, details
from condensegrpo.inspection.index import Index, OpenedTrajectory
from condensegrpo.inspection.inspector_page import write_inspector
from condensegrpo.inspection.panes import turns
from condensegrpo.inspection.pictures import SIDE, pictures_named
from condensegrpo.inspection.samples import sample
from condensegrpo.reporting.frames import turn_rows
from condensegrpo.reporting.run_report import write_page
from condensegrpo.storage.media import MediaFolder
from condensegrpo.storage.run_folder import RunFolder
from condensegrpo.storage.trajectories import Provenance


def png(color: str, width: int = 64, height: int = 32) -> MediaPart:
    file = io.BytesIO()
    Image.new("RGB", (width, height), color).save(file, "PNG")
    return MediaPart.of(file.getvalue(), "image/png")


RED, BLUE, BROKEN = png("#ff0000"), png("#0000ff", 640, 320), MediaPart.of(b"no picture", "image/png")


def screen(picture: MediaPart) -> Message:
    return Message(role="user", content=(TextPart(text="screen: "), picture))


def seen() -> ScoredTrajectory:
    """Three turns: a red picture, then a line for it and a blue one, then a broken one."""
    pinned, reply = user("start 3"), Message(role="assistant", content="ok")
    first = turn([1, 2], [3], context=(pinned,), observations=(screen(RED),))
    second = turn([1, 2, 3, 9, 9], [3], context=(pinned, reply, screen(RED)), observations=(screen(BLUE),))
    line = user("screen: [picture of turn 0 omitted: 2 tokens]")
    declared = condensation("rk", [4, 4], before=12, after=8, condenser="image_mask")
    third = turn(
        [1, 2, 9, 9, 9, 9],
        [3],
        condensation=declared,
        context=(pinned, reply, line, reply, screen(BLUE)),
        observations=(screen(BROKEN),),
    )
    media = ((), (RED.sha256,), (BLUE.sha256,))
    turns = (
        replace(each, media=hashes, picture_tokens=2 * len(hashes))
        for each, hashes in zip((first, second, third), media, strict=True)
    )
    return scored(trajectory(*turns, id="1/0/0", group="1/0"), 1.0)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    folder = RunFolder.create(tmp_path_factory.mktemp("runs") / "demo")
    folder.config.write_text("name: demo\nmodel: {new: {}}\ntask: {name: ledger}\n")
    for part in (RED, BLUE, BROKEN):
        folder.media.write(part)
    known = Provenance(
        evaluation=None, step=1, model="m", condenser="image_mask", max_context_tokens=48, temperature=1, seed=0
    )
    add_trajectory(folder.trajectories(1), seen(), known)
    return folder


def opened(run: RunFolder) -> OpenedTrajectory:
    index = Index(run.path)
    file = run.trajectories(1)
    batch = index.batch(file)
    (record,) = batch.records()
    return batch.open(record)


def drawn(part: object, color: str | None = "truecolor") -> str:
    console = Console(file=io.StringIO(), color_system=color, width=100, force_terminal=color is not None)  # type: ignore[arg-type]  # one of the names
    console.print(part)
    return console.file.getvalue()  # type: ignore[attr-defined]  # a StringIO


def test_a_picture_on_a_terminal_is_two_pixels_a_character(tmp_path: Path) -> None:
    media = MediaFolder(tmp_path)
    media.write(RED)
    text = drawn(TerminalPicture(media, RED.sha256))
    assert text.count("▀") == 32 * 8
    assert "38;2;255;0;0;48;2;255;0;0m" in text
    assert drawn(TerminalPicture(media, RED.sha256), color=None) == ""
    assert drawn(TerminalPicture(media, BLUE.sha256)) == ""  # not stored


def test_the_printed_turns_have_their_pictures(run: RunFolder) -> None:
    parts = [drawn(part) for part in details(opened(run).turns, full=False, media=run.media)]
    text = "".join(parts)
    assert "[image/png" in text
    assert "48;2;255;0;0m" in text
    assert "48;2;0;0;255m" in text
    assert "▀" not in "".join(drawn(part) for part in details(opened(run).turns, full=False))


def test_the_report_holds_small_pictures_of_the_newest_trajectories(run: RunFolder) -> None:
    uris = pictures_named([f"screen: {BROKEN.text}{RED.text}", BLUE.text, RED.text], run.media, most=2)
    assert list(uris) == [RED.text, BLUE.text]
    assert list(pictures_named([RED.text, BLUE.text], run.media, most=1)) == [RED.text]
    assert pictures_named(["no picture"], run.media, most=1) == {}
    run.metrics.write_text('{"step": 1, "success": 1.0}\n')
    page = write_page(run.path).read_text()
    assert page.count("data:image/png;base64,") == 2


def test_a_long_question_keeps_its_pictures_in_the_report() -> None:
    shown = turn([1], [2], context=(screen(RED),))
    found = sample("another", scored(replace(trajectory(shown), question="x" * 9000), 1.0), None)
    assert found["question"].endswith(f"(6000 more characters) {RED.text}")


def test_the_application_shows_the_pictures_of_the_prompt(run: RunFolder) -> None:
    trajectory_opened = opened(run)
    assert "48;2;255;0;0m" in drawn(shown(trajectory_opened, 1))
    last = drawn(shown(trajectory_opened, 2))
    assert "48;2;0;0;255m" in last
    assert "48;2;255;0;0m" not in last


def test_the_page_has_small_pictures_and_the_text_of_one_that_is_missing(run: RunFolder, tmp_path: Path) -> None:
    view = opened(run)
    index = Index(run.path)
    write_inspector(tmp_path / "page.html", index, [(view.batch, [view.record])], "one")
    page = (tmp_path / "page.html").read_text()
    uris = re.findall(r"(\[image/png [0-9a-f]{12}\])\"?:\s*\"data:image/png;base64,([A-Za-z0-9+/=]+)", page)
    assert {name for name, _ in uris} == {RED.text, BLUE.text}
    sizes = {name: Image.open(io.BytesIO(base64.b64decode(data))).size for name, data in uris}
    assert sizes == {RED.text: (64, 32), BLUE.text: (SIDE, SIDE // 2)}


def test_data_uris_are_made_once_for_each_picture(run: RunFolder) -> None:
    messages = [screen(RED), screen(RED), screen(BROKEN), user("text")]
    assert list(pictures_named((message.text for message in messages), run.media)) == [RED.text]


def test_a_data_frame_has_the_paths_of_pictures_and_their_tokens() -> None:
    rows = list(turn_rows("a", turns(seen(), None, budget=0, tokenizer=None)))
    assert [row["pictures"] for row in rows] == ["", f"media/{RED.sha256}", f"media/{BLUE.sha256}"]
    assert [row["picture_tokens"] for row in rows] == [0, 2, 2]
    assert seen().figures.picture_tokens == 2


def test_the_page_draws_pictures_and_dims_what_was_replaced(run: RunFolder, tmp_path: Path) -> None:
    view, index = opened(run), Index(run.path)
    write_inspector(tmp_path / "page.html", index, [(view.batch, [view.record])], "one")
    with chromium() as browser:
        watched = Watched.of(browser)
        tab = watched.open(tmp_path / "page.html", "#step=1&t=1/0/0&turn=1&tab=shown")
        pictures = tab.get_by_role("tabpanel").locator("img")
        assert [picture.get_attribute("alt") for picture in pictures.all()] == [RED.text, BLUE.text]
        assert pictures.first.evaluate("picture => picture.naturalWidth") == 64
        tab = watched.open(tmp_path / "page.html", "#step=1&t=1/0/0&turn=2&tab=full")
        removed = tab.get_by_role("tabpanel").locator("del img")
        assert [picture.get_attribute("alt") for picture in removed.all()] == [RED.text]
        assert removed.first.evaluate("picture => getComputedStyle(picture).opacity") == "0.45"
