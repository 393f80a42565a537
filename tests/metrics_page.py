"""What docs/reference/metrics.md says, read by tests: `from metrics_page import tables, unexplained, missing`."""

import re
from collections.abc import Iterable
from pathlib import Path

PAGE = Path(__file__).parent.parent / "docs" / "reference" / "metrics.md"
OF_A_STEP = (
    "Trajectories",
    "Multi-turn runs",
    "Credit",
    "Condensers",
    "The optimiser step",
    "Time",
)  # sections whose keys stand in a step's line


def tables() -> dict[str, list[tuple[str, ...]]]:
    """The rows of the table of every section, header left out, backquotes taken off."""
    found = {}
    for section in PAGE.read_text(encoding="utf-8").split("\n## ")[1:]:
        lines = [line for line in section.splitlines() if line.startswith("| ")]
        rows = [tuple(cell.strip().strip("`") for cell in re.split(r"(?<!\\)\|", line)[1:-1]) for line in lines[1:]]
        found[section.splitlines()[0]] = rows
    return found


def explained(key: str) -> bool:
    """Whether the page has a meaning for a key of metrics.jsonl."""
    sections = tables()
    if key == "step":
        return True
    if not key.startswith("eval/"):
        return any(_fits(row[0], key) for section in OF_A_STEP for row in sections[section])
    whole = [row[0].removeprefix("eval/") for row in sections["Evaluations"]]
    after = [*whole, *(row[0] for row in sections["Trajectories"])]
    rest = key.removeprefix("eval/")
    return any(_fits(name, rest) or _fits(name, rest.partition("/")[2]) for name in after)


def unexplained(lines: Iterable[dict[str, float]]) -> set[str]:
    """The keys of a metrics.jsonl that the page does not explain."""
    return {key for key in set().union(*lines) if not explained(key)}


def missing(line: dict[str, float]) -> set[str]:
    """The keys that the page promises for the line of every step, and that this one has not."""
    rows = [row for section in OF_A_STEP for row in tables()[section]]
    return {
        name for name, _, meaning in rows if not meaning.startswith("If ") and not any(_fits(name, k) for k in line)
    }


def _fits(name: str, key: str) -> bool:
    """Whether a key is meant by a name such as ``stop/<reason>``."""
    pattern = "".join("[^/]+" if part.startswith("<") else re.escape(part) for part in re.split(r"(<\w+>)", name))
    return re.fullmatch(pattern, key) is not None
