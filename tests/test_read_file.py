"""The tool read_file: files of its folder, and nothing else whatever the path says."""

import gc
import os
from pathlib import Path

import pytest

from condensegrpo.tools.read_file import ReadFile


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "secret.txt").write_text("secret")
    inside = tmp_path / "inside"
    (inside / "sub").mkdir(parents=True)
    (inside / "a.txt").write_text("hello")
    (inside / "sub/b.txt").write_text("deep")
    (inside / "link").symlink_to(tmp_path / "secret.txt")
    (inside / "inner").symlink_to(inside / "a.txt")
    os.mkfifo(inside / "pipe")
    return inside


@pytest.mark.parametrize(("path", "text"), [("a.txt", "hello"), ("sub/b.txt", "deep"), ("inner", "hello")])
def test_a_file_of_the_folder_is_read(folder: Path, path: str, text: str) -> None:
    assert ReadFile(folder=str(folder))(path) == text


@pytest.mark.parametrize("path", ["../secret.txt", "/etc/passwd", "link", "sub/../../secret.txt"])
def test_nothing_outside_of_the_folder_is_read(folder: Path, path: str) -> None:
    with pytest.raises(ValueError, match="is outside of the working folder"):
        ReadFile(folder=str(folder))(path)


@pytest.mark.parametrize("path", ["none.txt", "sub", "", "pipe"])
def test_what_is_no_file_is_refused_with_what_there_is(folder: Path, path: str) -> None:
    with pytest.raises(ValueError, match=r"there is no file .*the working folder holds: a\.txt"):
        ReadFile(folder=str(folder))(path)


def test_a_path_with_a_nul_character_is_refused(folder: Path) -> None:
    with pytest.raises(ValueError, match="NUL"):
        ReadFile(folder=str(folder))("a\0b")


def test_a_large_file_is_cut_and_said_so(folder: Path) -> None:
    assert ReadFile(folder=str(folder), max_bytes=3)("a.txt") == "hel\n[… only the first 3 bytes are shown …]"


def test_bytes_that_are_no_text_do_not_stop_the_tool(folder: Path) -> None:
    (folder / "raw").write_bytes(b"\xff\xfeok")
    assert ReadFile(folder=str(folder))("raw").endswith("ok")


def test_a_folder_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no such folder"):
        ReadFile(folder=str(tmp_path / "none"))


def test_without_a_folder_there_is_an_empty_one_that_goes_with_the_tool(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    tool = ReadFile()
    (made,) = tmp_path.iterdir()
    (made / "note").write_text("seen")
    assert tool("note") == "seen"
    with pytest.raises(ValueError, match="the working folder holds: note"):
        tool("train.jsonl")
    del tool
    gc.collect()
    assert not made.exists()
