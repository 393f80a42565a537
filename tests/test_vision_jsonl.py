"""The task vision_jsonl: pictures as paths, base64 and data URIs, before the question or at its marks."""

import asyncio
import base64
import io
import json
from pathlib import Path

import pytest
from PIL import Image

from condensegrpo.core.errors import DataError
from condensegrpo.core.messages import MediaPart, Message
from condensegrpo.tasks import vision_jsonl
from condensegrpo.tasks.vision_jsonl import VisionJsonl


def png(color: int, side: int = 4) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (side, side), (color, 0, 0)).save(file, "PNG")
    return file.getvalue()


RED, DARK = png(200), png(20)
LONG_FOLDER = "a_folder_with_a_name_of_more_than_sixty_four_characters_for_its_pictures"


def task(folder: Path, *rows: dict[str, object], **options: object) -> VisionJsonl:
    """A task of these rows, which are the evaluation data too, so that none is held out."""
    (folder / "red.png").write_bytes(RED)
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (folder / "other.jsonl").write_text(json.dumps({"question": "other?", "answer": "red", "pictures": "red.png"}))
    return VisionJsonl(data=str(folder / "rows.jsonl"), eval_data=str(folder / "other.jsonl"), **options)  # type: ignore[arg-type]  # of mixed types


def question(vision: VisionJsonl) -> Message:
    return asyncio.run(vision.environment(vision.problems("train")[0]).start())[-1]


def row(pictures: object, text: str = "What is it?") -> dict[str, object]:
    return {"question": text, "answer": "red", "pictures": pictures}


def test_one_question_about_many_pictures_is_many(tmp_path: Path) -> None:
    """All rows were held out, since the evaluation asks the same of other pictures."""
    (tmp_path / "dark.png").write_bytes(DARK)
    vision = task(tmp_path, row("red.png", "other?"), row("dark.png", "other?"))
    (kept,) = vision.problems("train")
    assert kept.data["pictures"] == [tmp_path / "dark.png"]
    assert vision.left_out == 1


def test_pictures_are_read_at_the_start_only_where_a_question_is_in_both_splits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = list[object]()

    def bytes_of(value: object, doing: str) -> bytes:
        read.append((value, doing))
        return b"png"

    monkeypatch.setattr(vision_jsonl, "_bytes", bytes_of)
    task(tmp_path, row("red.png", "first?"), row("red.png", "second?"))
    assert read == []
    task(tmp_path, row("red.png", "first?"), row("red.png", "Other?"), row("red.png", "other? <image>"))
    assert len(read) == 2  # of the training problem and of the held-out one


@pytest.mark.parametrize(
    "picture",
    [
        "red.png",
        base64.b64encode(RED).decode(),
        f"data:image/png;base64,{base64.b64encode(RED).decode()}",
        {"bytes": None, "path": "red.png"},
    ],
)
def test_a_picture_is_a_path_base64_or_a_data_uri(picture: object, tmp_path: Path) -> None:
    shown = question(task(tmp_path, row(picture)))
    (part,) = shown.media
    assert (part, part.data, part.type) == (MediaPart.of(RED, "image/png"), RED, "image/png")
    assert shown.parts[1].text == "\nWhat is it?"


def test_base64_without_a_slash_for_longer_than_a_file_name_is_a_picture(tmp_path: Path) -> None:
    flat = png(0, side=256)
    text = base64.b64encode(flat).decode()
    assert max(map(len, text.split("/"))) > 255  # the most bytes of a file's name
    assert [part.data for part in question(task(tmp_path, row(text))).media] == [flat]


def test_pictures_stand_where_the_question_has_marks(tmp_path: Path) -> None:
    (tmp_path / "dark.png").write_bytes(DARK)
    shown = question(task(tmp_path, row(["red.png", "dark.png"], "Is <image> left of <image>?")))
    kinds = [part.sha256 if isinstance(part, MediaPart) else part.text for part in shown.parts]
    assert kinds == ["Is ", MediaPart.of(RED, "").sha256, " left of ", MediaPart.of(DARK, "").sha256, "?"]


@pytest.mark.parametrize(
    ("pictures", "text", "words"),
    [
        ("blue.png", "What?", r"row 1 names the picture 'blue.png': there is no such file .*blue.png"),
        ([], "What?", "row 1 has 0 pictures"),
        (["red.png"], "<image> or <image>?", "row 1 has 1 pictures and 2 times <image>"),
        (f"{LONG_FOLDER}/1.png", "What?", r"row 1 names the picture 'a_folder.*: there is no such file"),
        (7, "What?", "row 1 has the picture 7, wanted a path, base64"),
        ("data:image/png;base64,=no=", "What?", "row 1 has a picture that is no base64"),
    ],
)
def test_a_row_that_is_wrong_is_named_before_anything_runs(
    pictures: object, text: str, words: str, tmp_path: Path
) -> None:
    with pytest.raises(DataError, match=words):
        task(tmp_path, row(pictures, text))


def test_a_column_that_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no column 'image'"):
        task(tmp_path, row("red.png"), pictures="image")


def test_a_file_that_is_no_picture_ends_its_episode(tmp_path: Path) -> None:
    (tmp_path / "notes.png").write_text("text")
    vision = task(tmp_path, row("notes.png"))
    with pytest.raises(DataError, match=r"problem train-0: .*notes.png begins with b'text', wanted one of image/png"):
        question(vision)
