"""A cluster of one machine: srun, squeue, scancel, scontrol and sbatch as executables on a PATH, for batch scripts.

Each executable sends what it was called with to this process and prints what comes back. srun's tasks are forks of a
process that has imported the libraries (``forked.py``); as in SLURM, an srun that gets SIGTERM kills its tasks.
"""

import itertools
import json
import select
import signal
import socketserver
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from command import ENVIRONMENT
from forked import ForkedCommand, command_server

NAMES = ("sbatch", "scancel", "scontrol", "squeue", "srun", "condensegrpo")
CLIENT = """#!{python} -SE
import json, os, signal, socket, sys
connection = socket.create_connection(("127.0.0.1", {port}))
signal.signal(signal.SIGTERM, lambda *_: connection.sendall(b"TERM"))
call = [os.path.basename(sys.argv[0]), *sys.argv[1:]]
connection.sendall(json.dumps([call, dict(os.environ), os.getcwd()]).encode() + b"\\n")
code, out = json.loads(connection.makefile().readline())
sys.stdout.write(out)
sys.exit(code)
"""


@dataclass
class Slurm:
    """A job and its steps."""

    folder: Path  # of the executables
    state: str = "RUNNING"
    calls: list[list[str]] = field(default_factory=list)
    steps: dict[str, list[ForkedCommand]] = field(default_factory=dict)  # by name, those that run
    ended: list[int] = field(default_factory=list)  # exit codes of tasks
    count: "itertools.count[int]" = field(default_factory=itertools.count)

    def environment(self, **more: str) -> dict[str, str]:
        """The variables of a batch script, which is job 4711."""
        job = {"SLURM_JOB_ID": "4711", "SLURM_JOB_NUM_NODES": "1", "SLURM_JOB_NODELIST": "localhost"}
        return {**ENVIRONMENT, **job, "SLURM_NTASKS": "1", "PATH": f"{self.folder}:{ENVIRONMENT['PATH']}", **more}

    def answer(self, call: Sequence[str], more: Mapping[str, str], cwd: str, killed: "Killed") -> tuple[int, str]:
        """Exit code and output of an executable."""
        match call:
            case ["srun", *arguments]:
                return self.run_step(arguments, more, cwd, killed)
            case ["condensegrpo", *arguments]:
                command = ForkedCommand(arguments, cwd=Path(cwd), environment=ENVIRONMENT, more=more)
                return self.wait([command], killed, signal.SIGTERM)
            case ["squeue", *_]:
                return 0, "".join(f"4711.{number} {name}\n" for number, name in enumerate(self.steps))
            case ["scancel", "--signal=TERM", step]:
                for command in list(self.steps.values())[int(step.removeprefix("4711."))]:
                    for _ in range(2):  # SLURM may send it twice
                        command.send_signal(signal.SIGTERM)
            case ["scontrol", "show", "job", "4711"]:
                return 0, f"JobId=4711 JobName=test\n   JobState={self.state} Reason=None\n"
            case ["scontrol", "show", "hostnames", nodes]:
                return 0, nodes.replace(",", "\n") + "\n"
        return 0, ""

    def run_step(
        self, arguments: Sequence[str], more: Mapping[str, str], cwd: str, killed: "Killed"
    ) -> tuple[int, str]:
        own = list(itertools.takewhile(lambda word: word.startswith("--"), arguments))
        options = dict(word.removeprefix("--").partition("=")[::2] for word in own)
        step = {
            **more,
            "SLURM_STEP_ID": str(next(self.count)),
            "SLURM_STEP_NODELIST": "localhost",
            "SLURM_NTASKS": (ranks := options.get("ntasks", more["SLURM_NTASKS"])),
        }
        program, *rest = arguments[len(own) :]
        if program != "condensegrpo":  # the servers: they run until srun is killed
            killed.wait()
            return 143, ""
        tasks = [
            ForkedCommand(
                rest, cwd=Path(cwd), environment=ENVIRONMENT,
                more={**step, "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)},
            )
            for rank in range(int(ranks))
        ]  # fmt: skip
        name = options.get("job-name", "condensegrpo")
        self.steps[name] = tasks
        try:
            return self.wait(tasks, killed, signal.SIGKILL)
        finally:
            del self.steps[name]

    def wait(self, tasks: Sequence[ForkedCommand], killed: "Killed", on_signal: int) -> tuple[int, str]:
        while any(task.poll() is None for task in tasks):
            if killed.within(0.02):
                for task in tasks:
                    task.send_signal(on_signal)
        codes = [128 - code if code < 0 else code for code in (task.wait() for task in tasks)]
        self.ended += codes
        return max(codes), "".join(text for task in tasks for text in task.communicate())


class Killed:
    """Whether the executable got SIGTERM, which it passes on, or was killed, which closes its connection."""

    def __init__(self, connection: "socketserver._RequestType") -> None:
        self._connection = connection

    def within(self, seconds: float) -> bool:
        return bool(select.select([self._connection], [], [], seconds)[0]) and self._connection.recv(4) is not None

    def wait(self) -> None:
        while not self.within(1.0):
            pass


@contextmanager
def slurm(folder: Path) -> Iterator[Slurm]:
    """The executables in a new folder, and the process that answers them."""
    command_server(tuple(sorted(ENVIRONMENT.items())))
    job = Slurm(folder)

    class Handler(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            call, environment, cwd = json.loads(self.rfile.readline())
            job.calls.append(call)
            more = {name: value for name, value in environment.items() if ENVIRONMENT.get(name) != value}
            answer = job.answer(call, more, cwd, Killed(self.connection))
            self.wfile.write(json.dumps(answer).encode() + b"\n")

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, daemon=True).start()
        folder.mkdir()
        for name in NAMES:
            (folder / name).write_text(CLIENT.format(python=sys.executable, port=server.server_address[1]))
            (folder / name).chmod(0o755)
        yield job
        server.shutdown()
