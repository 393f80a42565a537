"""The task ``agent``: an episode is a program or a function that calls the policy as a model of OpenAI or Anthropic.

    rows of a data set ─▶ Problem ─▶ agent with a URL and key of its own ── its requests ─▶ turns of one trajectory
                                      └── its answer, its exit status, or a command that judges ─▶ answer, outcome

The agent works as always: it declares tools and answers their calls, edits its history, asks again. Every request is
one turn, condensed, sampled and recorded as any other.
"""

import asyncio
import inspect
import json
import os
import re
import shutil
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Annotated, Literal, SupportsFloat

from annotated_types import Ge

from condensegrpo.core.failures import at_definition
from condensegrpo.core.protocols.environment import Step
from condensegrpo.core.protocols.task import Problem
from condensegrpo.episodes.boundary import Boundary, call_method
from condensegrpo.sandbox import folders
from condensegrpo.sandbox.calls import SandboxLimits
from condensegrpo.tasks.agent_endpoint import Inbox, client_variables, serving
from condensegrpo.tasks.agent_episode import AgentEpisode
from condensegrpo.tasks.jsonl import QuestionRows

PROBLEM = "problem.json"
Command = tuple[str, ...]
END_SECONDS = 10.0
_ROOT = str(Path(__file__).resolve().parents[2])
_MAIN = "import sys; sys.path.insert(0, sys.argv[1]); from condensegrpo.sandbox.program import main; main()"
_PASSED_ON = ("PATH", "LANG", "LC_ALL", "TZ")
_remove_leftovers = cache(folders.remove_leftovers)  # of episodes that were killed, once a process


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentLimits(SandboxLimits):
    """The limits of a program, which takes longer and more than a call of a tool."""

    seconds: float = 600
    memory_mib: int = 8192
    processes: int = 256
    disk_mib: int = 1024
    files: int = 100_000


Result = Step | str | float | None
AgentFunction = Callable[[Problem, str, str], Awaitable[Result] | Result]  # problem, base URL, key


def _check_function(function: AgentFunction) -> None:
    """Raise ValueError for a function that cannot be called with problem, URL and key."""
    try:
        signature = inspect.signature(function)
    except ValueError:  # not known of what is built in
        return
    try:
        signature.bind(None, "", "")
    except TypeError:
        raise ValueError(f"the agent takes {signature}, wanted (problem, url, key){at_definition(function)}") from None


class ProgramFailed(Exception):
    """A program could not be started, exceeded a limit, or ended with another status than 0."""


class LimitExceeded(ProgramFailed):
    """A program exceeded a limit."""


@dataclass(kw_only=True, eq=False)
class Agent(QuestionRows):
    """Trains a program or function that calls the policy as a model of OpenAI or Anthropic.

    The program does not see the ground truth.
    """

    # a command, in which {question} and {id} are replaced, or a function of the problem, the URL and the key
    program: Command | AgentFunction
    folder: str | None = None  # the program works in a copy of it; None: in an empty folder
    variables: tuple[str, ...] = ()  # of the environment that the program gets too
    answer_file: str | None = None  # in its folder, with its answer; None: what it printed
    # of its outcome: whether the exit status is 0, or a command that judges in its folder; None: it has none
    outcome: Literal["exit_status"] | Command | None = None
    # of ``folder``, put back before the judging command runs, with the problem: what the program cannot change
    protected: tuple[str, ...] = ()
    limits: AgentLimits = AgentLimits()  # of the program; ``seconds`` of a function too
    requests: Annotated[int, Ge(1)] = 1000  # of one episode, refused ones included
    tool_format: str = "native"

    def __post_init__(self) -> None:
        self.limits = AgentLimits(**self.limits) if isinstance(self.limits, dict) else self.limits
        if callable(self.program):
            _check_function(self.program)
        if self.folder is not None and not Path(self.folder).is_dir():
            raise ValueError(f"there is no folder {self.folder!r} (looked for {Path(self.folder).resolve()})")
        for name in self.protected:
            parts = Path(name).parts
            inside = self.folder is not None and parts and not Path(name).is_absolute() and ".." not in parts
            if not inside or ("{id}" not in name and not Path(self.folder or "", name).exists()):
                raise ValueError(f"protected names {name!r}, wanted a file or folder of the folder {self.folder!r}")
        if missing := [name for name in self.variables if name not in os.environ]:
            raise ValueError(f"the environment has no variable {missing[0]!r}, which variables passes to the program")
        super().__post_init__()

    def environment(self, problem: Problem) -> "ProgramEpisode":
        """A fresh episode."""
        return ProgramEpisode(self, problem)


class ProgramEpisode(AgentEpisode):
    """One run of a program or a function."""

    def __init__(self, task: Agent, problem: Problem) -> None:
        """Nothing is begun before ``start``."""
        super().__init__(Inbox(task.requests), task.tool_format)
        self._task, self._problem = task, problem

    async def run(self) -> Step:
        """The program or function from its start to its end, with a URL and a key of its own."""
        program = self._task.program
        async with serving(self.inbox) as url:
            run = self._program(program, url) if isinstance(program, tuple) else self._called(program, url)
            result: Result = await run
        if isinstance(result, str | None):
            result = Step(answer=result)
        elif not isinstance(result, Step):
            if not isinstance(result, SupportsFloat):
                raise TypeError(
                    f"it returned {result!r:.80}, wanted its answer as text, a number, what the episode was worth, "
                    f"or a Step with both"
                )
            result = Step(outcome=float(result))
        answer = self.inbox.hidden(result.answer) if isinstance(result.answer, str) else result.answer
        return replace(result, done=True, answer=answer)

    async def _called(self, function: AgentFunction, url: str) -> Result:
        """What a function returns; one that is not asynchronous runs in a thread of its own."""
        async with Boundary("the agent", seconds=self._task.limits.seconds, setting="limits.seconds"):
            result: Result = await call_method(function, self._problem, url, self.inbox.key)
            return result

    async def _program(self, command: Command, url: str) -> Step:
        async with self._workspace() as folder:
            work, log = folder / "work", folder / "program"
            failure: ProgramFailed | None = None
            try:
                status = await self._ran(command, work, log, client_variables(url, self.inbox.key))
                if status:
                    failure = ProgramFailed(f"{command[0]!r} ended with status {status}")
            except ProgramFailed as error:
                failure = error
            if failure is not None and self._task.outcome is None:
                written = self._text(log.with_suffix(".err")) or self._text(log.with_suffix(".out"))
                said = f": {self.inbox.hidden(written)[-300:]}" if written else ""
                raise ProgramFailed(f"{failure}{said}") from failure
            answers = log.with_suffix(".out") if self._task.answer_file is None else work / self._task.answer_file
            answer = self._text(answers) or None  # before the command that judges can change it
            return Step(answer=answer, outcome=await self._outcome(failure, folder))

    @asynccontextmanager
    async def _workspace(self) -> AsyncIterator[Path]:
        """A folder with ``work``, where the program works, and with the files of what it prints."""
        name, lock = folders.make()
        making = asyncio.create_task(asyncio.to_thread(self._make, Path(name, "work")))
        try:
            await asyncio.shield(making)
            yield Path(name)
        finally:
            await asyncio.wait([making])  # a thread goes on when what waits for it is cancelled
            await asyncio.to_thread(folders.remove, name)
            os.close(lock)

    def _make(self, work: Path) -> None:
        _remove_leftovers()
        if self._task.folder is None:
            work.mkdir()
        else:
            shutil.copytree(self._task.folder, work, symlinks=True)
        self._write_problem(work)

    async def _ran(self, command: Command, work: Path, log: Path, environment: Mapping[str, str]) -> int:
        variables = {**{name: os.environ[name] for name in self._task.variables}, **environment}
        limits = self._task.limits
        return await run_program(self._filled(command), folder=work, environment=variables, limits=limits, log=log)

    def _text(self, file: Path) -> str:
        """The last ``output_bytes`` of a file as text; empty: there is no such file."""
        if not file.is_file():
            return ""
        with file.open("rb") as opened:
            opened.seek(max(file.stat().st_size - self._task.limits.output_bytes, 0))
            return opened.read().decode("utf-8", "replace").strip()

    async def _outcome(self, failure: ProgramFailed | None, folder: Path) -> float | None:
        """1 or 0, or the number in the last line that the judging command printed."""
        if self._task.outcome is None or self._task.outcome == "exit_status":
            return None if self._task.outcome is None else float(failure is None)
        work, log, home = folder / "work", folder / "judge", folder / "home"
        if not await asyncio.to_thread(self._restored, work):
            return 0.0
        home.mkdir()  # without settings that the program wrote for others
        try:
            if await self._ran(self._task.outcome, work, log, {"HOME": str(home)}):
                return 0.0
        except LimitExceeded:  # by what the agent left
            return 0.0
        lines = self._text(log.with_suffix(".out")).splitlines()
        try:
            return float(lines[-1]) if lines else 1.0
        except ValueError:
            return 1.0

    def _filled(self, command: Command) -> tuple[str, ...]:
        """A command with the question and the id in it."""
        values = {"{question}": self._problem.question, "{id}": self._problem.id}
        return tuple(re.sub(r"\{question\}|\{id\}", lambda name: values[name[0]], argument) for argument in command)

    def _restored(self, work: Path) -> bool:
        """Put back ``protected`` and the problem; False: what the program left in their place cannot be replaced."""
        names = self._filled(self._task.protected)
        if not all(_cleared(name, work) for name in (*names, PROBLEM)):
            return False
        for name in names:
            original = Path(self._task.folder or "", name)
            if original.is_dir():
                shutil.copytree(original, work / name, symlinks=True)
            else:
                shutil.copy2(original, work / name)
        self._write_problem(work)
        return True

    def _write_problem(self, work: Path) -> None:
        """Write the problem as the program reads it: without the ground truth."""
        hidden = {"answer", "aliases", self._task.answer}
        data = {name: value for name, value in self._problem.data.items() if name not in hidden}
        shown = {"id": self._problem.id, "question": self._problem.question, "data": data}
        (work / PROBLEM).write_text(json.dumps(shown, default=str), encoding="utf-8")


def _cleared(name: str, work: Path) -> bool:
    """Make room for a file or folder of a name; False: the program left something that is not its own there."""
    place = work / name
    try:
        if not place.parent.resolve().is_relative_to(work.resolve()):  # through a link
            return False
        place.parent.mkdir(parents=True, exist_ok=True)
        if place.is_dir() and not place.is_symlink():
            folders.remove(str(place))
        place.unlink(missing_ok=True)
    except (OSError, RuntimeError):  # a file in the place of a folder, links in a circle
        return False
    return True


async def run_program(
    command: Sequence[str], *, folder: Path, environment: Mapping[str, str], limits: SandboxLimits, log: Path
) -> int:
    """Run a program to its end; with a cancellation it ends, and every process that it started.

    Args:
        folder: in which it runs; also its home and the place of its temporary files.
        environment: its variables, beside ``PATH`` and those of the locale.
        log: prefix of the files of its output, ``.out`` and ``.err``.

    Returns:
        Its exit status, or −signal.
    """
    files = {"folder": str(folder), "stdout": f"{log}.out", "stderr": f"{log}.err"}
    request = {"command": list(command), "limits": asdict(limits), **files}
    text = json.dumps(request, ensure_ascii=False)  # the kernel limits its bytes, of which an escaped letter has six
    inherited = {name: os.environ[name] for name in _PASSED_ON if name in os.environ}
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-I", "-S", "-c", _MAIN, _ROOT, text),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        start_new_session=True,  # Ctrl-C is for the owner
        env={**inherited, "HOME": str(folder), "TMPDIR": str(folder), **environment},
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        report = json.loads(await process.stdout.read() or b'{"trouble": "its supervisor was killed"}')
    finally:
        process.stdin.close()  # which ends the program
        with suppress(TimeoutError):
            await asyncio.wait_for(process.wait(), END_SECONDS)
    if trouble := report.get("trouble"):
        raise ProgramFailed(f"starting {command[0]!r}: {trouble}")
    if limit := report["limit"]:
        raise LimitExceeded(f"{command[0]!r} exceeded its limit {limit}={getattr(limits, limit)}")
    return int(report["status"])
