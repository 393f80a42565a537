"""The endpoint of ``condensegrpo proxy``: agents that run elsewhere, each session an episode of the task ``agent``.

    agent ── POST, see DIALECTS ──▶ Proxy ── its session ──▶ inbox of the episode ──▶ engine ──▶ upstream
          ◀─────────────────────────────────────── what the episode replies ◀───────────────────────────

The program of such an episode is the remote agent: it lasts until no request has come for a while. Requests belong to
the session that they name, in a header or after the token, or else to the conversation that they continue.
"""

import asyncio
import secrets
import socket
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import ExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count

from aiohttp import web

from condensegrpo.core.credentials import redacted
from condensegrpo.core.errors import CondenseError
from condensegrpo.core.messages import Message, encodable
from condensegrpo.core.protocols.task import Problem
from condensegrpo.core.trajectory import StopReason, Trajectory
from condensegrpo.episodes.encoding import LARGE
from condensegrpo.episodes.engine import Engine
from condensegrpo.episodes.episode import run_episode
from condensegrpo.episodes.group import problem_draw, stream_seed
from condensegrpo.sandbox.calls import SandboxLimits
from condensegrpo.tasks.agent import Agent
from condensegrpo.tasks.agent_conversation import arguments_of, plain_messages
from condensegrpo.tasks.agent_endpoint import (
    MAX_BYTES,
    MESSAGES,
    AgentEndpoint,
    Inbox,
    api_keys,
    chat_runner,
    close_server,
    hidden,
    read_body,
)
from condensegrpo.tasks.agent_request import ChatReply, ChatRequest, Dialect, Earlier, RequestRefused, read_request

HEADER = "X-Session-Id"
ENDLESS = SandboxLimits(seconds=1e9)  # of an agent: only its session ends it
OVER = 410  # the status of an episode that has ended


@dataclass(kw_only=True, eq=False)
class RemoteAgent(Agent):
    """The task ``agent`` without rows: others run the agent."""

    data: str = ""
    limits: SandboxLimits = ENDLESS
    requests: int = 1_000_000

    def __post_init__(self) -> None:
        """There is nothing to read."""


@dataclass(kw_only=True, eq=False)
class _Session:
    """One conversation with an agent, and the episode that it is."""

    name: str  # that its requests give it; empty: they are recognised by their messages
    number: int
    first: tuple[Message, ...]  # the messages of its first request
    newest: tuple[Message, ...] = ()  # those of the last one that was answered
    reply: Message | None = None  # that answered them
    inbox: "asyncio.Future[Inbox]"  # of the episode
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    waiting: int = 0  # requests that are being answered
    timer: asyncio.TimerHandle | None = None  # sets ``ended``

    async def lasts(self, problem: Problem, url: str, key: str) -> str:
        """The program of the episode."""
        self.inbox.set_result(AgentEndpoint.inbox(key))
        await self.ended.wait()
        return ""

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
    _open: dict[_Session, "asyncio.Task[Trajectory]"] = field(default_factory=dict, init=False)
    _numbers: Iterator[int] = field(default_factory=count, init=False)
    _stopping: bool = field(default=False, init=False)
    _earlier: Earlier = field(default_factory=dict, init=False, repr=False)

    @asynccontextmanager
    async def serving(self, host: str, port: int) -> AsyncIterator[int]:
        """Serve in a block, which gets the port (0: any); at its end sessions end, after their replies under way."""
        with ExitStack() as opened:
            listening = await _listening(host, port, opened)
            runner = await chat_runner(
                self._complete, self._count, "proxy", self._session_name, max_bytes=self.max_bytes
            )
            try:
                for each in listening:
                    await web.SockSite(runner, each).start()
                try:
                    yield listening[0].getsockname()[1]
                finally:
                    self._stopping = True
                    for session in self._open:
                        session.ended.set()
                    await asyncio.gather(*self._open.values())
                    await close_server(runner, *listening)
            finally:
                await runner.cleanup()

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

    async def _reply(self, session: _Session, request: ChatRequest) -> ChatReply:
        """What the episode of a session replies; RequestRefused with the reason if it has ended."""
        played = self._open[session]
        await asyncio.wait((session.inbox, played), return_when=asyncio.FIRST_COMPLETED)
        if session.inbox.done():
            try:
                inbox = session.inbox.result()
                with inbox.admitted():
                    return await inbox.reply_to(request)
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

    def _session(self, name: str, messages: tuple[Message, ...]) -> _Session:
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
        inbox = asyncio.get_running_loop().create_future()
        session = _Session(name=name, number=next(self._numbers), first=messages, inbox=inbox)
        self._open[session] = asyncio.create_task(self._played(session))
        return session

    async def _played(self, session: _Session) -> Trajectory:
        """Play the episode of a session."""
        name = session.name or f"session-{session.number}"
        question = next((message.text for message in reversed(session.first) if message.role == "user"), "")
        try:
            trajectory = await run_episode(
                Problem(id=name, question=question),
                environment=RemoteAgent(program=session.lasts, tool_format=self.tool_format).environment,
                engine=self.engine,
                group_id=f"0/{session.number}",
                sample=0,
                seed=partial(stream_seed, self.seed, session.number, name, 0),
                draw=problem_draw(self.seed, session.number, name),
            )
        finally:
            del self._open[session]
        if (
            trajectory.stop is StopReason.ANSWERED and trajectory.turns
        ):  # the session has ended, and its last reply stands
            trajectory = replace(trajectory, answer=trajectory.turns[-1].reply.text)
        self.finished(trajectory)
        return trajectory


async def _listening(host: str, port: int, opened: ExitStack) -> list[socket.socket]:
    """A socket at every address of a host, of IPv4 and IPv6, all at the same port (0: any); ``opened`` closes them."""
    found = await asyncio.get_running_loop().getaddrinfo(
        host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )
    listening = list[socket.socket]()
    for family, address in dict.fromkeys((family, address) for family, *_, address in found):
        taken = listening[0].getsockname()[1] if listening else port
        server = socket.create_server((address[0], taken, *address[2:]), family=family)
        listening.append(opened.enter_context(server))
    return listening
