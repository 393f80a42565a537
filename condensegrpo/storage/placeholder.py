"""Files that hold something else in place of what their names say. Standard library only."""

from pathlib import Path

HEAD = 64  # bytes that tell


def placeholder_in(path: Path) -> str | None:
    """What a file holds instead of data, and what to do, as the end of a sentence; None: nothing of that kind.

    b"version https://git-lfs.github.com/spec/v1"  ─▶  "it is a Git LFS pointer, not the data. Fetch it with: …"

    Raises:
        OSError: the file cannot be read.
    """
    with path.open("rb") as file:
        head = file.read(HEAD)
    if head.startswith(b"version https://git-lfs"):
        return "it is a Git LFS pointer, not the data. Fetch it with: git lfs pull"
    if head.lstrip().lower().startswith((b"<!doctype html", b"<html")):
        return "it is a web page, not data. The download went wrong: fetch the raw file"
    return None
