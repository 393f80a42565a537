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
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, SupportsFloat

from annotated_types import Ge, Gt, Lt
from pydantic import BeforeValidator

from condensegrpo.core.failures import at_definition
from condensegrpo.core.messages import Message
from condensegrpo.core.protocols.environment import Environment, Step
from condensegrpo.core.protocols.task import Problem
from condensegrpo.core.protocols.tool import EnvironmentTool
from condensegrpo.core.trajectory import FinishReason
from condensegrpo.episodes.boundary import Boundary, called
from condensegrpo.sandbox import folders
from condensegrpo.sandbox.calls import SandboxLimits
from condensegrpo.tasks.agent_conversation import Conversation, plain_messages
from condensegrpo.tasks.agent_endpoint import AgentEndpoint, Count, Inbox
from condensegrpo.tasks.agent_request import ChatReply, ChatRequest
from condensegrpo.tasks.answers import SHARE, SplitTask
from condensegrpo.tasks.jsonl import Jsonl

PROBLEM = "problem.json"
LIMITS = SandboxLimits(seconds=600, memory_mib=8192, processes=256, disk_mib=1024, files=100_000)
Command = tuple[str, ...]
END_SECONDS = 10.0
_ROOT = str(Path(__file__).resolve().parents[2])
_MAIN = "import sys; sys.path.insert(0, sys.argv[1]); from condensegrpo.sandbox.program import main; main()"
_PASSED_ON = ("PATH", "LANG", "LC_ALL", "TZ")
_remove_leftovers = cache(folders.remove_leftovers)  # of episodes that were killed, once a process


def _completed(value: Any) -> Any:  # noqa: ANN401  limits, or what is not valid
    """Some limits with the others as in ``LIMITS``, not as in the class."""
    return {**asdict(LIMITS), **value} if isinstance(value, dict) else value


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
class Agent(SplitTask):
    """Trains a program or function that calls the policy as a model of OpenAI or Anthropic."""

    # a command, in which {question} and {id} are replaced, or a function of the problem, the URL and the key
    program: Command | AgentFunction
    data: str  # training rows, see ``rows.read_rows``
    eval_data: str | None = None  # held-out rows
    question: str = "question"  # column of the question
    answer: str | None = "answer"  # column of the ground truth, which the program does not see; None: none
    id: str | None = None  # column of the problem's id; by default the row's number
    eval_share: Annotated[float, Gt(0), Lt(1)] = SHARE  # of the questions, held out if there is no ``eval_data``
    folder: str | None = None  # the program works in a copy of it; None: in an empty folder
    variables: tuple[str, ...] = ()  # of the environment that the program gets too
    answer_file: str | None = None  # in its folder, with its answer; None: what it printed
    # of its outcome: whether the exit status is 0, or a command that judges in its folder; None: it has none
    outcome: Literal["exit_status"] | Command | None = None
    # of ``folder``, put back before the judging command runs, with the problem: what the program cannot change
    protected: tuple[str, ...] = ()
    # of the program, those that are not given as in ``LIMITS``; ``seconds`` of a function too
    limits: Annotated[SandboxLimits, BeforeValidator(_completed)] = LIMITS
    requests: Annotated[int, Ge(1)] = 1000  # of one episode, refused ones included
    tool_format: str = "native"

    def __post_init__(self) -> None:
        self.limits = SandboxLimits(**_completed(self.limits)) if isinstance(self.limits, dict) else self.limits
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
        self._splits = Jsonl(
            data=self.data,
            eval_data=self.eval_data,
            question=self.question,
            answer=self.answer,
            id=self.id,
            eval_share=self.eval_share,
        )._splits

    def environment(self, problem: Problem) -> "AgentEpisode":
        """A fresh episode."""
        return AgentEpisode(task=self, problem=problem)


@dataclass(kw_only=True, eq=False)
class AgentEpisode(Environment):
    """One run of the agent; its requests are answered one after another."""

    task: Agent
    problem: Problem
    _inbox: Inbox | None = field(default=None, init=False)
    _folder: tuple[Path, int] | None = field(default=None, init=False)  # and a descriptor with a lock on it
    _making: "asyncio.Task[Path] | None" = field(default=None, init=False)  # of the folder
    _running: "asyncio.Task[Step] | None" = field(default=None, init=False)
    _request: ChatRequest | None = field(default=None, init=False)  # that waits for the next reply
    _finish: FinishReason = field(default=FinishReason.STOP, init=False)  # of the next reply
    _count: Count | None = field(default=None, init=False)  # of the tokens of a prompt

    def count_with(self, count: Count) -> None:
        """Take up how the tokens of a prompt are counted, for agents that ask."""
        self._count = count

    async def start(self) -> tuple[Message, ...]:
        """The messages of the first request."""
        self._conversation = Conversation(self.task.tool_format)
        self._inbox = await AgentEndpoint.opened(self.task.requests)
        if (count := self._count) is not None:
            form = self.task.tool_format
            self._inbox.count = lambda messages, tools: count(plain_messages(messages, form), tools)
        self._running = asyncio.create_task(self._run(self._inbox))
        self._request = await self._next()
        if self._request is None:
            refused = f", the last that was refused: {self._inbox.refused}" if self._inbox.refused else ""
            result = self._running.result()
            raise RuntimeError(
                f"the agent ended without a request that can be answered{refused} (answer {result.answer!r:.200})"
            )
        return self._conversation.begin(self._request.messages)

    def tools(self) -> Sequence[EnvironmentTool]:
        """Those that the waiting request declares; the agent answers their calls."""
        return () if self._request is None else self._request.tools

    @property
    def stop_strings(self) -> Sequence[str]:
        """Those of the waiting request."""
        return () if self._request is None else self._request.stop

    def read_finish(self, finish: FinishReason) -> None:
        """Take up why the next reply ended, which the agent gets with it."""
        self._finish = finish

    async def step(self, reply: Message) -> Step:
        """Send a reply; what the agent says next, or how it ended."""
        request = self._request
        assert request is not None
        sent = self._conversation.send(request.messages, reply, stops=request.stop, calls=request.calls_tools)
        if not request.reply.done():  # else its client is gone
            stop = next((string for string in request.stop if string in reply.text), None)
            request.reply.set_result(ChatReply(message=sent, finish=self._finish, stop=stop))
        self._request = await self._next()
        if self._request is None:
            assert self._running is not None
            return self._running.result()
        tools = self._request.tools
        return self._conversation.step(self._request.messages, tools=bool(tools), same_tools=tools == request.tools)

    async def close(self) -> None:
        """End the agent with all its processes, and refuse what it still asks for."""
        if self._running is not None:
            self._running.cancel()
        if self._inbox is not None:
            await self._inbox.close()
        if self._running is not None:
            await asyncio.gather(self._running, return_exceptions=True)
        if self._making is not None:  # a thread goes on when what waits for it is cancelled
            await asyncio.gather(self._making, return_exceptions=True)
        if self._folder is not None:
            folder, lock = self._folder
            await asyncio.to_thread(folders.remove, str(folder))
            os.close(lock)

    async def _next(self) -> ChatRequest | None:
        """The next request; None: the agent has ended."""
        assert self._inbox is not None
        assert self._running is not None
        request = asyncio.create_task(self._inbox.next())
        try:
            await asyncio.wait((request, self._running), return_when=asyncio.FIRST_COMPLETED)
            return request.result() if request.done() else None
        finally:
            request.cancel()

    async def _run(self, inbox: Inbox) -> Step:
        """The agent from its start to its end."""
        program = self.task.program
        run = self._program(program, inbox) if isinstance(program, tuple) else self._called(program, inbox)
        result = await run
        if isinstance(result, str | None):
            result = Step(answer=result)
        elif not isinstance(result, Step):
            if not isinstance(result, SupportsFloat):
                raise TypeError(
                    f"it returned {result!r:.80}, wanted its answer as text, a number, what the episode was worth, "
                    f"or a Step with both"
                )
            result = Step(outcome=float(result))
        answer = inbox.hidden(result.answer) if isinstance(result.answer, str) else result.answer
        return replace(result, done=True, answer=answer)

    async def _called(self, function: AgentFunction, inbox: Inbox) -> Result:
        """What a function returns; one that is not asynchronous runs in a thread of its own."""
        async with Boundary("the agent", seconds=self.task.limits.seconds, setting="limits.seconds"):
            result: Result = await called(function, self.problem, inbox.url, inbox.key)
            return result

    async def _program(self, command: Command, inbox: Inbox) -> Step:
        self._making = asyncio.create_task(asyncio.to_thread(self._made))
        folder = await asyncio.shield(self._making)
        log = folder.parent / "program"
        failure: ProgramFailed | None = None
        try:
            status = await self._ran(command, log, inbox.variables)
            if status:
                failure = ProgramFailed(f"{command[0]!r} ended with status {status}")
        except ProgramFailed as error:
            failure = error
        if failure is not None and self.task.outcome is None:
            written = self._text(log.with_suffix(".err")) or self._text(log.with_suffix(".out"))
            said = f": {inbox.hidden(written)[-300:]}" if written else ""
            raise ProgramFailed(f"{failure}{said}") from failure
        answers = log.with_suffix(".out") if self.task.answer_file is None else folder / self.task.answer_file
        # the answer is read before the command that judges can change it
        return Step(answer=self._text(answers) or None, outcome=await self._outcome(failure))

    def _made(self) -> Path:
        """The folder that the program works in."""
        _remove_leftovers()
        name, lock = folders.make()
        self._folder = Path(name), lock
        work = Path(name, "work")
        if self.task.folder is None:
            work.mkdir()
        else:
            shutil.copytree(self.task.folder, work, symlinks=True)
        self._write_problem(work)
        return work

    async def _ran(self, command: Command, log: Path, environment: Mapping[str, str]) -> int:
        variables = {**{name: os.environ[name] for name in self.task.variables}, **environment}
        return await run_program(
            self._filled(command), folder=log.parent / "work", environment=variables, limits=self.task.limits, log=log
        )

    def _text(self, file: Path) -> str:
        """The last ``output_bytes`` of a file as text; empty: there is no such file."""
        if not file.is_file():
            return ""
        with file.open("rb") as opened:
            opened.seek(max(file.stat().st_size - self.task.limits.output_bytes, 0))
            return opened.read().decode("utf-8", "replace").strip()

    async def _outcome(self, failure: ProgramFailed | None) -> float | None:
        """1 or 0, or the number in the last line that the judging command printed."""
        if self.task.outcome is None or self.task.outcome == "exit_status":
            return None if self.task.outcome is None else float(failure is None)
        assert self._folder is not None
        log = self._folder[0] / "judge"
        if not await asyncio.to_thread(self._restored, log.parent / "work"):
            return 0.0
        (home := log.parent / "home").mkdir()  # without settings that the program wrote for others
        try:
            if await self._ran(self.task.outcome, log, {"HOME": str(home)}):
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
        values = {"{question}": self.problem.question, "{id}": self.problem.id}
        return tuple(re.sub(r"\{question\}|\{id\}", lambda name: values[name[0]], argument) for argument in command)

    def _restored(self, work: Path) -> bool:
        """Put back ``protected`` and the problem; False: what the program left in their place cannot be replaced."""
        names = self._filled(self.task.protected)
        if not all(_cleared(name, work) for name in (*names, PROBLEM)):
            return False
        for name in names:
            original = Path(self.task.folder or "", name)
            if original.is_dir():
                shutil.copytree(original, work / name, symlinks=True)
            else:
                shutil.copy2(original, work / name)
        self._write_problem(work)
        return True

    def _write_problem(self, work: Path) -> None:
        """Write the problem as the program reads it: without the ground truth."""
        hidden = {"answer", "aliases", self.task.answer}
        data = {name: value for name, value in self.problem.data.items() if name not in hidden}
        shown = {"id": self.problem.id, "question": self.problem.question, "data": data}
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
