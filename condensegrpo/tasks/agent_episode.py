"""The episode of an agent: its requests are the turns, one after another, whoever runs it."""

import asyncio
from collections.abc import Callable, Sequence

from condensegrpo.core.messages import Message
from condensegrpo.core.protocols.environment import Environment, Step
from condensegrpo.core.protocols.tool import EnvironmentTool
from condensegrpo.core.trajectory import FinishReason
from condensegrpo.tasks.agent_conversation import AgentConversation, plain_messages
from condensegrpo.tasks.agent_endpoint import Inbox
from condensegrpo.tasks.agent_request import ChatReply, ChatRequest


class AgentEpisode(Environment):
    """One run of an agent; its requests are answered one after another. Subclasses run the agent."""

    def __init__(self, inbox: Inbox, tool_format: str) -> None:
        """``inbox``: of its requests."""
        self.inbox = inbox
        self._format = tool_format
        self._conversation = AgentConversation(tool_format)
        self._running: asyncio.Task[Step] | None = None
        self._request: ChatRequest | None = None  # that waits for the next reply
        self._finish = FinishReason.STOP  # of the next reply

    async def run(self) -> Step:
        """The agent from its start to its end."""
        raise NotImplementedError

    def count_with(self, count: Callable[[Sequence[Message], Sequence[EnvironmentTool]], int]) -> None:
        """Take up how the tokens of a prompt are counted, for agents that ask."""
        self.inbox.count = lambda messages, tools: count(plain_messages(messages, self._format), tools)

    async def start(self) -> tuple[Message, ...]:
        """The messages of the first request."""
        self._running = asyncio.create_task(self.run())
        self._request = await self._next(self._running)
        if self._request is None:
            refused = f", the last that was refused: {self.inbox.refused}" if self.inbox.refused else ""
            result = self._running.result()
            raise RuntimeError(
                f"the agent ended without a request that can be answered{refused} (answer {result.answer!r:.200})"
            )
        return self._conversation.begin(self._request.messages)

    def tools(self) -> Sequence[EnvironmentTool]:
        """The tools that the waiting request declares; the agent answers their calls."""
        return () if self._request is None else self._request.tools

    @property
    def stop_strings(self) -> Sequence[str]:
        """The stop strings of the waiting request."""
        return () if self._request is None else self._request.stop

    def read_finish(self, finish: FinishReason) -> None:
        """Take up why the next reply ended, which the agent gets with it."""
        self._finish = finish

    async def step(self, reply: Message) -> Step:
        """Send a reply; what the agent says next, or how it ended."""
        request, running = self._request, self._running
        assert request is not None
        assert running is not None
        sent = self._conversation.send(request.messages, reply, stops=request.stop, calls=request.calls_tools)
        if not request.reply.done():  # else its client is gone
            stop = next((string for string in request.stop if string in reply.text), None)
            request.reply.set_result(ChatReply(message=sent, finish=self._finish, stop=stop))
        self._request = await self._next(running)
        if self._request is None:
            return running.result()
        tools = self._request.tools
        return self._conversation.step(self._request.messages, tools=bool(tools), same_tools=tools == request.tools)

    async def close(self) -> None:
        """End the agent with all its processes, and refuse what it still asks for."""
        self.inbox.close()
        if self._running is not None:
            self._running.cancel()
            await asyncio.gather(self._running, return_exceptions=True)

    async def _next(self, running: "asyncio.Task[Step]") -> ChatRequest | None:
        """The next request; None: the agent has ended."""
        request = asyncio.create_task(self.inbox.next())
        try:
            await asyncio.wait((request, running), return_when=asyncio.FIRST_COMPLETED)
            return request.result() if request.done() else None
        finally:
            request.cancel()
