"""Runs ``train`` and notes when each line of its progress came: what a user waits for, and in silence."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from gpu.record import Record

RAND = Path(__file__).parent / "rand.yaml"
METRICS = ("seconds", "tokens/", "ratio", "gap")  # of a step, that are noted
TITLES = {"phase": "title", "message": "text", "step": "step"}  # of an event, what tells it from others


def train(
    record: Record, run: str, policy: Path, overrides: Sequence[str], environment: Mapping[str, str] | None = None
) -> bool:
    """One run of ``rand.yaml``; every event is noted as it comes, with the seconds since the start.

    Returns:
        Whether it ended by itself and without an error.
    """
    folder = record.out / "runs"
    command = [sys.executable, "-m", "condensegrpo", "train", str(RAND), "--overwrite", "--json"]
    command += [f"name={run}", f"model.path={policy.absolute()}", f"runs_dir={folder.absolute()}", *overrides]
    with (record.out / f"{run}.stderr").open("wb") as errors:
        process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=errors,
            env={**os.environ, **(environment or {})},
            start_new_session=True,
        )
        try:
            assert process.stdout is not None
            seen = []
            for fact in timeline(process.stdout, time.monotonic()):
                record.note("train", run=run, **fact)
                seen.append(fact)
            code = process.wait()
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    said = (record.out / f"{run}.stderr").read_text(encoding="utf-8", errors="replace").splitlines()
    record.note("trained", run=run, code=code, **summary(seen), error="\n".join(said[-5:]) if code else "")
    return code == 0


def timeline(lines: Iterable[bytes], began: float) -> Iterator[dict[str, object]]:
    """The events of ``train --json`` as they come: seconds since the start, and after the event before."""
    last = 0.0
    for line in lines:
        now = round(time.monotonic() - began, 2)
        event = json.loads(line)
        kind = str(event["event"])
        what = str(event.get(TITLES.get(kind, ""), ""))[:300]
        metrics = {key: value for key, value in event.get("metrics", {}).items() if key.startswith(METRICS)}
        yield {"since_start": now, "after": round(now - last, 2), "kind": kind, "what": what, **metrics}
        last = now


def summary(events: Sequence[Mapping[str, object]]) -> dict[str, object]:
    """Seconds until the first step, the longest wait between two events until then, and each step's seconds.

    Example: events at 2 (message), 3 (phase "loading"), 9 (step 1) give first_step 9 and silence [6, "loading"].
    """
    first = next((place for place, event in enumerate(events) if event["kind"] == "step"), None)
    start = events if first is None else events[: first + 1]
    waits = [
        (float(str(event["after"])), "start" if place == 0 else str(start[place - 1]["what"]))
        for place, event in enumerate(start)
    ]
    return {
        "first_step": None if first is None else events[first]["since_start"],
        "silence": list(max(waits, default=(0.0, ""))),
        "steps": [event.get("seconds") for event in events if event["kind"] == "step"],
    }
