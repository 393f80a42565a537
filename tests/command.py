"""Runs the command line as a user does: a process of its own, one torch thread, plain output.

The process is a fork that has imported the libraries already (``forked.py``).
"""

import os
import resource
import runpy
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path

from forked import ForkedCommand, forked_ranks, main

from condensegrpo.core.packages import TRAIN

ROOT = Path(__file__).parent.parent
ENVIRONMENT: Mapping[str, str] = {
    **os.environ,
    "OMP_NUM_THREADS": "1",  # bit-equal runs need a fixed number of threads
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",
    "COLUMNS": "160",
    "NO_COLOR": "1",
}

# a run of seconds: short problems of the quickstart's task and half of its policy with hardly any steps
TINY = (
    "configs/quickstart.yaml",
    "model.new.layers=1",
    "task.options={min_ops: 2, max_ops: 3, train_problems: 512, eval_problems: 16}",
    "warm_start={steps: 30, turns_per_step: 8, probe_target: null}",
    "warm_start.optimiser={lr: 0.015, betas: [0.9, 0.95], schedule: constant}",
    "train.steps=4",
    "train.problems_per_step=4",
    "train.samples_per_problem=4",
    "train.eval_every=2",
    "train.save_every=2",
    "evaluate.problems=4",
    "evaluate.variants={}",
    "algorithm={advantage: {estimator: grpo}}",
    "reward={name: weighted_sum, options: {parts: [{name: correct, weight: 1}, {name: format, weight: 0.2}]}}",
)


def command(*arguments: str, launcher: tuple[str, ...] = ("-m",)) -> list[str]:
    return [sys.executable, *launcher, "condensegrpo", *arguments]


def run(
    *arguments: str,
    cwd: Path = ROOT,
    seconds: float = 240,
    program: Callable[[], object] = main,
) -> subprocess.CompletedProcess[str]:
    """The command, or another ``program`` with these arguments, to its end."""
    process = ForkedCommand(arguments, cwd=cwd, environment=ENVIRONMENT, program=program)
    try:
        out, err = process.communicate(timeout=seconds)
    finally:
        process.kill()
    return subprocess.CompletedProcess(process.args, process.wait(), out, err)


def on_a_full_disk(size: int) -> None:
    """The command where a file may have ``size`` bytes at most: the system answers with the same kind of error."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
    main()


def without_the_extra(*more: Sequence[str]) -> None:
    """The command, then those with ``more`` arguments until one fails, without the packages of the extra."""
    for name in list(sys.modules):  # those that had imported them
        if name.startswith("condensegrpo.") or name.partition(".")[0] == "transformers":
            del sys.modules[name]
    sys.modules.update(dict.fromkeys(TRAIN))
    from condensegrpo.cli.app import main as imported_again

    for arguments in (sys.argv[1:], *more):
        sys.argv[1:] = arguments
        try:
            imported_again()
        except SystemExit as end:
            if end.code:
                raise


def at_terminal(terminal: Connection) -> None:
    """The command with a terminal as its streams: the connection brings its descriptor into the fork."""
    for stream in range(3):
        os.dup2(terminal.fileno(), stream)
    terminal.close()
    sys.stdin = os.fdopen(0)
    main()


def succeed(*arguments: str, cwd: Path = ROOT, program: Callable[[], object] = main) -> str:
    done = run(*arguments, cwd=cwd, program=program)
    assert done.returncode == 0, f"{done.args}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return done.stdout


def run_script(path: Path) -> None:
    """A Python file as the interpreter runs it: it may import what lies beside it."""
    sys.path.insert(0, str(path.parent))
    runpy.run_path(str(path), run_name="__main__")


def run_as_the_interpreter(path: Path) -> None:
    """Run a program; what it raises is shown by ``sys.excepthook``, from the line of the program on."""
    try:
        run_script(path)
    except Exception as error:
        trace = error.__traceback__
        while trace is not None and trace.tb_frame.f_code.co_filename != str(path):
            trace = trace.tb_next
        sys.excepthook(type(error), error.with_traceback(trace), trace)
        sys.exit(1)


def succeed_as_script(path: Path, *arguments: str) -> str:
    """What a Python file prints with these arguments, in a fork."""
    return succeed(*arguments, program=partial(run_script, path))


def succeed_on_two_ranks(*arguments: str, program: Callable[[], object] = main, seconds: float = 240) -> None:
    """Run a command on two ranks, in forks: what a launcher does by itself is tested with it."""
    ranks = forked_ranks(arguments, cwd=ROOT, environment=ENVIRONMENT, program=program)
    try:
        for rank in ranks:
            out, err = rank.communicate(timeout=seconds)
            assert rank.returncode == 0, f"{rank.args}\n{out[-3000:]}\n{err[-3000:]}"
    finally:
        for rank in ranks:
            rank.kill()


def start(*arguments: str, launcher: tuple[str, ...] | None = None) -> "subprocess.Popen[str] | ForkedCommand":
    """A running command; with a launcher it is one of new interpreters."""
    if launcher is None:
        return ForkedCommand(arguments, cwd=ROOT, environment=ENVIRONMENT)
    return subprocess.Popen(
        command(*arguments, launcher=launcher),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env=ENVIRONMENT,
    )
