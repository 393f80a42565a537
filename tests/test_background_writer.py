"""Lines that are written beside a rollout: in order, all of them, and a full disk is still an error."""

import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from condensegrpo.core.errors import RunError
from condensegrpo.storage.files import BackgroundWriter, append_line


def test_it_returns_at_once_and_writes_everything_in_order(tmp_path: Path) -> None:
    path, gate = tmp_path / "t.jsonl", threading.Event()
    with BackgroundWriter() as writer:
        writer.submit(gate.wait)  # a slow disk
        for line in "abc":
            writer.submit(partial(append_line, path, line))
        assert not path.exists()
        gate.set()
    assert path.read_text() == "a\nb\nc\n"


def written(*writes: Callable[[], object], then: Callable[[BackgroundWriter], None] = lambda _: None) -> None:
    with BackgroundWriter() as writer:
        for write in writes:
            writer.submit(write)
        then(writer)


def test_what_it_has_is_written_also_when_it_is_interrupted(tmp_path: Path) -> None:
    def interrupt(_: BackgroundWriter) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        written(partial(append_line, tmp_path / "t.jsonl", "a"), then=interrupt)
    assert (tmp_path / "t.jsonl").read_text() == "a\n"


def test_a_full_disk_is_raised_at_the_end_and_nothing_is_written_after_it(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="No space left on device"):
        written(partial(append_line, Path("/dev/full"), "a"), partial(append_line, tmp_path / "t.jsonl", "b"))
    assert not (tmp_path / "t.jsonl").exists()


def test_a_full_disk_is_raised_by_the_next_write() -> None:
    def write_on(writer: BackgroundWriter) -> None:
        for _ in range(1000):
            time.sleep(0.01)
            writer.submit(int)
        raise AssertionError("no write raised the error")

    with pytest.raises(RunError, match="No space left on device"):
        written(partial(append_line, Path("/dev/full"), "a"), then=write_on)
