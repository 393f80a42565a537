"""Time and memory of `condensegrpo inspect` on large runs: to the first screen, and until all is indexed.

    python benchmarks/inspector.py --out /tmp/inspector            # 100,000 trajectories, 2 GB, made in a minute

Two layouts of the same trajectories: a run of 400 steps, and one file. Each is opened twice by a process of its own: as
a first visit, and with the index that it left. Results: docs/results/inspector.md.
"""

import argparse
import asyncio
import json
import resource
import subprocess
import sys
import time
from pathlib import Path

STEPS, GROUPS, SAMPLES = 400, 32, 8
TURNS, TOKENS = 8, 40  # of a trajectory, and of each of its replies: 20 kB a line
BEGAN = time.perf_counter()


def line(step: str, problem: str, sample: str) -> str:
    """A line of a trajectory file, about a made-up question."""
    from condensegrpo.core.messages import Message
    from condensegrpo.core.scored_trajectory import figures_of
    from condensegrpo.core.trajectory import Score, StopReason, Trajectory, Turn
    from condensegrpo.storage.stored_trajectory import stored
    from condensegrpo.storage.trajectories import Provenance, record_line

    known = Provenance(
        evaluation=None, step=1, model="m", condenser="full", max_context_tokens=4096, temperature=1.0, seed=0
    )
    context, prompt, turns = (Message(role="user", content=f"question of problem {problem}"),), tuple(range(200)), []
    for turn in range(TURNS):
        ids = tuple(range(1000 + turn, 1000 + turn + TOKENS))
        reply = Message(role="assistant", content=f"thought {turn} " * 30)
        result = Message(role="tool", content=f"result {turn} " * 40, name="search")
        turns.append(
            Turn(
                prompt_ids=prompt, output_ids=ids, logprobs=tuple(-0.123456789012 - each / 7 for each in range(TOKENS)),
                policy_version=0, context=context, reply=reply, observations=(result,), tool_attempts=1,
                tool_successes=turn % 2,
            )
        )  # fmt: skip
        prompt, context = (*prompt, *ids, *range(120)), (*context, reply, result)
    trajectory = Trajectory(
        id=f"{step}/{problem}/{sample}", problem_id=f"problem-{problem}", group_id=f"{step}/{problem}", sample=7,
        question=f"question of problem {problem}", ground_truth="result 3", turns=tuple(turns),
        stop=StopReason.ANSWERED, answer="result 2", seconds=1.0,
    )  # fmt: skip
    score = Score(
        total=0.5, components={"correct": 0.5}, format_valid=True, correct=0.5,
        context_tokens=trajectory.max_context_tokens,
    )  # fmt: skip
    figures = figures_of(trajectory, score)
    return record_line({"provenance": known, "figures": figures, "trajectory": stored(trajectory), "score": score})


def make(folder: Path, trajectories: int) -> tuple[Path, Path]:
    """A run, and one file with the same lines: the fields that differ are replaced in one line."""
    template = line("<step>", "<problem>", "<sample>").replace('"sample":7', '"sample":<sample>')
    run, single = folder / "run", folder / "single.jsonl"
    (run / "trajectories").mkdir(parents=True, exist_ok=True)
    (run / "config.yaml").write_text("model: {new: {}}\ntask: {name: ledger}\n")
    per_step = trajectories // STEPS
    with single.open("w") as whole:
        for step in range(1, STEPS + 1):
            with (run / f"trajectories/step_{step:06d}.jsonl").open("w") as file:
                for number in range(per_step):
                    problem, sample = divmod(number, SAMPLES)
                    text = template.replace("<step>", str(step)).replace("<problem>", str(problem))
                    text = text.replace("<sample>", str(sample)) + "\n"
                    file.write(text)
                    whole.write(text)
    return run, single


async def visit(path: Path, *, whole: bool) -> dict[str, float]:
    """Open the application without a terminal: seconds and memory at the first screen, and once all is indexed."""
    from condensegrpo.cli.inspect_app.app import InspectorApp
    from condensegrpo.cli.inspect_app.selection import Listing, Selection
    from condensegrpo.inspection.batches import choose
    from condensegrpo.inspection.index import Index

    app = InspectorApp(Selection(Index(path), choose(path, None)))
    async with app.run_test(size=(150, 45)) as pilot:
        measured = {"first_screen": time.perf_counter() - BEGAN, "first_cpu": time.process_time(), "first_mb": peak()}
        if whole:
            await app.workers.wait_for_complete()
            measured |= {"indexed": time.perf_counter() - BEGAN, "indexed_cpu": time.process_time()}
            began, used = time.perf_counter(), time.process_time()
            app.find_where(Listing("largest", "tool_errors > 0", "-context", ()))
            await app.workers.wait_for_complete()
            measured |= {"view": time.perf_counter() - began, "view_cpu": time.process_time() - used, "mb": peak()}
        await pilot.pause()
        app.workers.cancel_all()
    return measured


def peak() -> float:
    """The largest memory of this process so far, in MB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1000


def main() -> None:
    """Make the runs, open each twice, print a table."""
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
    columns = ("first screen, s (CPU s)", "memory then, MB", "all indexed, s (CPU s)", "a view over all, s (CPU s)")
    print(f"| | {' | '.join(columns)} | memory, MB |")
    print("|---|---|---|---|---|---|")
    for path in paths:
        for name in ("first visit", "later visit"):
            command = [sys.executable, __file__, "--out", str(given.out), "--visit", str(path)]
            read = json.loads(subprocess.run(command, capture_output=True, check=True, text=True).stdout)
            first = f"{read['first_screen']:.2f} ({read['first_cpu']:.2f}) | {read['first_mb']:.0f}"
            indexed = f"{read['indexed']:.1f} ({read['indexed_cpu']:.1f})"
            view = f"{read['view']:.2f} ({read['view_cpu']:.2f})"
            row = f"| {path.name}, {name} | {first} | {indexed} | {view} | {read['mb']:.0f} |"
            print(row, flush=True)


if __name__ == "__main__":
    main()
