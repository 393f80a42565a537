"""The endpoint of ``condensegrpo proxy``: agents that run elsewhere, each session an episode of the task ``agent``.

    agent ── POST, see DIALECTS ──▶ Proxy ── its session ──▶ inbox of the episode ──▶ engine ──▶ upstream
          ◀─────────────────────────────────────── what the episode replies ◀───────────────────────────

Such an episode lasts until no request has come for a while. Requests belong to the session that they name, in a header
or after the token, or else to the conversation that they continue.
"""

import asyncio
import secrets
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count

from aiohttp import web

from condensegrpo.core.credentials import redacted
from condensegrpo.core.errors import CondenseError
from condensegrpo.core.messages import Message, encodable
from condensegrpo.core.protocols.environment import Step
from condensegrpo.core.protocols.task import Problem, Split, Task
from condensegrpo.core.trajectory import StopReason, Trajectory
from condensegrpo.episodes.encoding import LARGE
from condensegrpo.episodes.engine import Engine
from condensegrpo.episodes.episode import run_episode
from condensegrpo.episodes.group import problem_draw, stream_seed
from condensegrpo.tasks.agent_conversation import arguments_of, plain_messages
from condensegrpo.tasks.agent_endpoint import (
    MAX_BYTES,
    MESSAGES,
    Inbox,
    api_keys,
    chat_runner,
    hidden,
    listening,
    read_body,
)
from condensegrpo.tasks.agent_episode import AgentEpisode
from condensegrpo.tasks.agent_request import ChatReply, ChatRequest, Dialect, Earlier, RequestRefused, read_request

HEADER = "X-Session-Id"
REQUESTS = 1_000_000  # of a session
OVER = 410  # the status of an episode that has ended


class RemoteAgent(Task):
    """The task of a configuration that is proxied: its agents run elsewhere."""

    def problems(self, split: Split) -> Sequence[Problem]:
        """None: agents begin sessions by themselves."""
        return ()

    def environment(self, problem: Problem) -> "Session":
        """The session of a problem."""
        return Session("native", name=problem.id, number=0, first=())


class Session(AgentEpisode):
    """One conversation with an agent that runs elsewhere: an episode, which lasts until no request has come."""

    def __init__(self, tool_format: str, *, name: str, number: int, first: tuple[Message, ...]) -> None:
        """``name``: that its requests give it; empty: they are recognised by their messages, as those after
        ``first``.
        """
        super().__init__(Inbox(REQUESTS), tool_format)
        self.name, self.number, self.first = name, number, first
        self.newest: tuple[Message, ...] = ()  # the messages of the last request that was answered
        self.reply: Message | None = None  # that answered it
        self.ended = asyncio.Event()
        self.waiting = 0  # requests that are being answered
        self.timer: asyncio.TimerHandle | None = None  # sets ``ended``

    async def run(self) -> Step:
        """Nothing: the agent is not ours."""
        await self.ended.wait()
        return Step(done=True, answer="")

    def continued_by(self, messages: Sequence[Message]) -> int:
        """How well messages continue it.

        4: newest request and reply; 3: the same, with more behind the reply's text or without its calls; 2: the newest
        request alone; 1: the first request; 0: not at all.
        """
        newest, first = len(self.newest), len(self.first)
        if self.reply is not None and len(messages) > newest and tuple(messages[:newest]) == self.newest:
            said, text = messages[newest], self.reply.text.strip()
            calls, others = (
                [(call.name, arguments_of(call)) for call in each.tool_calls] for each in (said, self.reply)
            )
            if said.text.strip() == text and calls == others:  # clients write the JSON of their arguments anew
                return 4
            return 3 if text and said.text.strip().startswith(text) else 2
        return int(len(messages) > first and tuple(messages[:first]) == self.first)


@dataclass(kw_only=True, eq=False)
class Proxy:
    """Answers agents; use it in one event loop."""

    engine: Engine  # its ``turn_seconds`` are more than ``idle_seconds``
    tool_format: str
    token: str = field(repr=False)  # that requests bring as their key, alone or as ``token:session``
    finished: Callable[[Trajectory], None]  # called with the trajectory of every session that ended, even without reply
    sessions: int = 64  # most that are open at a time
    idle_seconds: float = 3600.0  # after the last reply, when a session ends
    seed: int = 0  # names the random streams of replies
    max_bytes: int = MAX_BYTES  # of a request
    _open: dict[Session, "asyncio.Task[Trajectory]"] = field(default_factory=dict, init=False)
    _numbers: Iterator[int] = field(default_factory=count, init=False)
    _stopping: bool = field(default=False, init=False)
    _earlier: Earlier = field(default_factory=dict, init=False, repr=False)

    @asynccontextmanager
    async def serving(self, host: str, port: int) -> AsyncIterator[int]:
        """Serve in a block, which gets the port (0: any); at its end sessions end, after their replies under way."""
        runner = await chat_runner(self._complete, self._count, "proxy", self._session_name, max_bytes=self.max_bytes)
        async with listening(runner, host, port) as taken:
            try:
                yield taken
            finally:
                self._stopping = True
                for session in self._open:
                    session.ended.set()
                await asyncio.gather(*self._open.values())

    async def _complete(self, http: web.Request, dialect: Dialect) -> tuple[ChatRequest, ChatReply]:
        name = self._session_name(http)
        body = hidden(await read_body(http), self.token)
        request = read_request(body, dialect, self._earlier)
        if len(body) > LARGE:
            await asyncio.to_thread(self._tokenise, request.messages)
        session = self._session(name, request.messages)
        session.waiting += 1
        if session.timer is not None:
            session.timer.cancel()
        try:
            reply = await self._reply(session, request)
            session.newest, session.reply = request.messages, reply.message
            return request, reply
        finally:
            session.waiting -= 1
            if not session.waiting:
                session.timer = asyncio.get_running_loop().call_later(self.idle_seconds, session.ended.set)

    async def _count(self, http: web.Request) -> int:
        self._session_name(http)  # refuses a wrong key
        request = read_request(await read_body(http), MESSAGES)
        messages = plain_messages(request.messages, self.tool_format)
        return await asyncio.to_thread(self.engine.tokens_of, messages, request.tools)

    def _tokenise(self, messages: Sequence[Message]) -> None:
        """Tokenise messages, so that the renderer remembers their ids when the episode needs them on the event loop."""
        with suppress(CondenseError):  # of a message that no prompt can show: the episode says so
            for message in messages:
                self.engine.renderer.count([message])

    async def _reply(self, session: Session, request: ChatRequest) -> ChatReply:
        """What the episode of a session replies; RequestRefused with the reason if it has ended."""
        played = self._open[session]
        try:
            with session.inbox.admitted():
                return await session.inbox.reply_to(request)
        except RequestRefused as refused:
            if refused.status != OVER:
                raise
        session.ended.set()
        trajectory = await asyncio.shield(played)
        why = f"the session has ended ({trajectory.stop}): {redacted(trajectory.detail)}"
        raise RequestRefused(why, status=400 if trajectory.stop is StopReason.CONTEXT_OVERFLOW else 502)

    def _session_name(self, request: web.Request) -> str:
        """The name of a request's session, empty if it gives none; RequestRefused without the token."""
        for key in map(encodable, api_keys(request)):
            token, name = key[: len(self.token)], key[len(self.token) :]
            if secrets.compare_digest(token.encode(), self.token.encode()) and name[:1] in ("", ":"):
                return encodable(request.headers.get(HEADER, name[1:])[:200])
        raise RequestRefused("the key is not the token of this proxy, alone or as TOKEN:SESSION", status=401)

    def _session(self, name: str, messages: tuple[Message, ...]) -> Session:
        """The open session of a request, or a new one."""
        if self._stopping:
            raise RequestRefused("the proxy is ending", status=503)
        running = [each for each in self._open if each.name == name and not each.ended.is_set()]
        ranked = [(4 if name else each.continued_by(messages), each.number, each) for each in running]
        fits, _, session = max(ranked, default=(0, 0, None), key=lambda ranking: ranking[:2])
        if session is not None and fits:
            return session
        if len(self._open) >= self.sessions:
            raise RequestRefused(f"{self.sessions} sessions are open, which is the limit", status=429)
        session = Session(self.tool_format, name=name, number=next(self._numbers), first=messages)
        self._open[session] = asyncio.create_task(self._played(session))
        return session

    async def _played(self, session: Session) -> Trajectory:
        """Play the episode of a session."""
        name = session.name or f"session-{session.number}"
        question = next((message.text for message in reversed(session.first) if message.role == "user"), "")
        try:
            trajectory = await run_episode(
                Problem(id=name, question=question),
                environment=lambda _: session,
                engine=self.engine,
                group_id=f"0/{session.number}",
                sample=0,
                seed=partial(stream_seed, self.seed, session.number, name, 0),
                draw=problem_draw(self.seed, session.number, name),
            )
        finally:
            del self._open[session]
        if trajectory.stop is StopReason.ANSWERED and trajectory.turns:  # the last reply of the session stands
            trajectory = replace(trajectory, answer=trajectory.turns[-1].reply.text)
        self.finished(trajectory)
        return trajectory
