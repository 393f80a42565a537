"""Time and memory of `condensegrpo inspect` on large runs: to the first screen, and until all figures are read.

    python benchmarks/inspector.py --out /tmp/inspector            # 100,000 trajectories, 2 GB, made in three minutes

Two layouts of the same trajectories: a run of 400 steps, and one file. Each is opened by a process of its own, which
then searches for a word that no trajectory has. Results: docs/results/inspector.md.
"""

import argparse
import asyncio
import json
import random
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from condensegrpo.core.scored_trajectory import ScoredTrajectory

STEPS, SAMPLES = 400, 8
TURNS, PROMPT, TOKENS, RESULT = 8, 400, 80, 80  # of a trajectory, its first prompt, each reply and each result
WORDS = [f"word{number}" for number in range(5000)]
BEGAN = time.perf_counter()


def trajectory(draw: random.Random, problem: int, sample: int) -> "ScoredTrajectory":
    """A trajectory of random ids and words, which hardly compress."""
    from condensegrpo.core.messages import Message
    from condensegrpo.core.scored_trajectory import ScoredTrajectory
    from condensegrpo.core.shared_sequence import shared, shared_ids
    from condensegrpo.core.trajectory import Score, StopReason, Trajectory, Turn

    def ids(count: int) -> tuple[int, ...]:
        return tuple(draw.randrange(150_000) for _ in range(count))

    def message(role: Literal["user", "assistant", "tool"], count: int) -> Message:
        return Message(role=role, content=" ".join(draw.choices(WORDS, k=count)))

    context, prompt, turns = shared([message("user", PROMPT)]), shared_ids(ids(PROMPT)), list[Turn]()
    for number in range(TURNS):
        output, reply, result = ids(TOKENS), message("assistant", TOKENS), message("tool", RESULT)
        turns.append(
            Turn(
                prompt_ids=prompt, output_ids=output, logprobs=tuple(-draw.random() for _ in output), policy_version=0,
                context=context, reply=reply, observations=(result,), tool_attempts=1, tool_successes=number % 2,
            )
        )  # fmt: skip
        prompt, context = prompt.extended((*output, *ids(RESULT))), context.extended((reply, result))
    played = Trajectory(
        id=f"1/{problem}/{sample}", problem_id=f"problem-{problem}", group_id=f"1/{problem}", sample=sample,
        question=f"question of problem {problem}", ground_truth="3", turns=tuple(turns), stop=StopReason.ANSWERED,
        answer="2", seconds=1.0,
    )  # fmt: skip
    parts = {"correct": draw.random()}
    tokens = played.max_context_tokens
    score = Score(total=0.5, components=parts, format_valid=True, correct=parts["correct"], context_tokens=tokens)
    return ScoredTrajectory.of(played, score)


def make(folder: Path, trajectories: int) -> tuple[Path, Path]:
    """A run, and one file with the same trajectories: those of a step are those of the first with other ids."""
    import pyarrow
    import pyarrow.parquet
    from pyarrow import compute

    from condensegrpo.storage.trajectories import ROWS, Credit, Provenance, write_credit, write_trajectories

    run, single, draw = folder / "run", folder / "single.parquet", random.Random(0)
    for name in ("trajectories", "credit"):
        (run / name).mkdir(parents=True, exist_ok=True)
    (run / "config.yaml").write_text("model: {new: {}}\ntask: {name: ledger}\n")
    known = Provenance(
        evaluation=None, step=1, model="m", condenser="full", max_context_tokens=4096, temperature=1.0, seed=0
    )
    places = [divmod(number, SAMPLES) for number in range(trajectories // STEPS)]
    first = run / "trajectories/step_000001.parquet"
    write_trajectories(first, [trajectory(draw, *place) for place in places], known)
    table = pyarrow.parquet.read_table(first)
    with pyarrow.parquet.ParquetWriter(single, table.schema, compression="zstd") as whole:
        for step in range(1, STEPS + 1):
            renamed = table
            for name in ("id", "group_id"):
                values = compute.replace_substring_regex(table[name], "^1/", f"{step}/")
                renamed = renamed.set_column(table.schema.get_field_index(name), name, values)
            file = run / f"trajectories/step_{step:06d}.parquet"
            pyarrow.parquet.write_table(renamed, file, compression="zstd", row_group_size=ROWS)
            whole.write_table(renamed, row_group_size=ROWS)
            names = renamed["id"].to_pylist()
            credit = (Credit(trajectory=name, advantages=(0.5,) * TURNS, weights=(0.1,) * TURNS) for name in names)
            write_credit(run / f"credit/step_{step:06d}.parquet", credit)
    return run, single


async def visit(path: Path, *, whole: bool) -> dict[str, float]:
    """Open the application without a terminal: seconds and memory of its screens, a view, a search."""
    from condensegrpo.cli.inspect_app import InspectorApp
    from condensegrpo.cli.inspect_selection import Listing, Selection
    from condensegrpo.inspection.batches import choose
    from condensegrpo.inspection.index import Index

    app = InspectorApp(Selection(Index(path), choose(path, None)))
    async with app.run_test(size=(150, 45)) as pilot:
        measured = {"first_screen": time.perf_counter() - BEGAN, "first_cpu": time.process_time(), "first_mb": peak()}
        if whole:
            await app.workers.wait_for_complete()
            measured |= {"read": time.perf_counter() - BEGAN, "read_cpu": time.process_time()}
            began, used = time.perf_counter(), time.process_time()
            app.find_where(Listing("largest", "tool_errors > 0", "-context", ()))
            await app.workers.wait_for_complete()
            measured |= {"view": time.perf_counter() - began, "view_cpu": time.process_time() - used, "mb": peak()}
            began, used = time.perf_counter(), time.process_time()
            await pilot.press("slash", *"nosuchword", "enter")
            await app.workers.wait_for_complete()
            measured |= {"search": time.perf_counter() - began, "search_cpu": time.process_time() - used}
        await pilot.pause()
        app.workers.cancel_all()
    return measured


def peak() -> float:
    """The largest memory of this process so far, in MB; ``getrusage`` counts that of the program that started it."""
    status = Path("/proc/self/status").read_text(encoding="ascii")
    return int(status.partition("VmHWM:")[2].split()[0]) / 1000


def main() -> None:
    """Make the runs, open each, print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--trajectories", type=int, default=100_000)
    parser.add_argument("--visit", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.visit is not None:
        print(json.dumps(asyncio.run(visit(given.visit, whole=True))))
        return
    paths = make(given.out, given.trajectories)
    print(f"{given.trajectories} trajectories, {paths[1].stat().st_size / 1e9:.2f} GB in each layout")
    columns = ("first screen", "all figures", "a view over all", "a search in all texts")
    print(f"| | {', s (CPU s) | '.join(columns)}, s (CPU s) | memory at first, MB | at last |")
    print("|---" * 7 + "|")
    for path in paths:
        command = [sys.executable, __file__, "--out", str(given.out), "--visit", str(path)]
        read = json.loads(subprocess.run(command, capture_output=True, check=True, text=True).stdout)
        kinds = (("first_screen", "first_cpu"), ("read", "read_cpu"), ("view", "view_cpu"), ("search", "search_cpu"))
        seconds = " | ".join(f"{read[wall]:.2f} ({read[cpu]:.2f})" for wall, cpu in kinds)
        print(f"| {path.name} | {seconds} | {read['first_mb']:.0f} | {read['mb']:.0f} |", flush=True)


if __name__ == "__main__":
    main()
