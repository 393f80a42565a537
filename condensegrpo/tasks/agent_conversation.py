"""Finds the replies of the policy in the messages of an agent, and what the agent made of its history.

An agent sends its whole history with every request, so each request says which replies and results are in it:

    system, user, reply 0, tool, reply 1, tool     ─▶  pinned: system, user; units: (reply 0, tool), (reply 1, tool)

A reply is recognised by the messages that it was sampled for, by the ids of its calls, or by its text. One that comes
back as it was stays the sampled one. What the agent added after it is a user message of its unit. Where the agent
declares tools, a user message after a reply without calls is one of the user and survives condensers; without tools
it may be any observation. Whatever else
differs from the last request and what followed it, such as a reply that was edited or left out, or another
conversation in between, is a rewritten history, which is declared.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from condensegrpo.core.messages import History, Message, ToolCall, Unit
from condensegrpo.core.protocols.environment import RewrittenHistory, Step
from condensegrpo.episodes import strictjson
from condensegrpo.episodes.toolformats import JSON_FORMATS, Native, Tagged, parsed_arguments

AGENT = "agent"  # declares what it rewrote


@dataclass(frozen=True, slots=True, kw_only=True)
class _Reply:
    sampled: Message  # the whole text, calls included; ids of calls as in the engine
    sent: Message  # as the agent got it; ids of calls unique in the episode


class AgentConversation:
    """The messages of one episode."""

    def __init__(self, tool_format: str) -> None:
        """``tool_format`` names the format of the run; calls of a format of others are read, but stay in the text."""
        self._format: Native | Tagged | None = JSON_FORMATS.get(tool_format)
        self._replies: list[_Reply] = []
        self._by_request = defaultdict[int, list[int]](list)  # numbers of replies, by the messages of their request
        self._by_call: dict[str, tuple[int, ToolCall]] = {}
        self._history = History(pinned=())

    def begin(self, messages: Sequence[Message]) -> tuple[Message, ...]:
        """The pinned messages, from the first request."""
        self._history = self._read(messages, tools=False)
        return self._history.pinned

    def send(self, messages: Sequence[Message], reply: Message, *, stops: Sequence[str], calls: bool) -> Message:
        """The reply to a request as the agent gets it: without its stop string, and with its calls beside the text."""
        number, text = len(self._replies), reply.text
        for stop in stops:
            text = text.partition(stop)[0]
        sent = Message(role="assistant", content=text, reasoning=reply.reasoning)
        if calls and reply.tool_calls:
            before = text
            if self._format is not None:
                thought, end, rest = text.rpartition("</think>")
                before = thought + end + rest.partition(self._format.opening)[0]
            named = tuple(
                replace(call, id=f"call_{number}_{index}", arguments=_unquoted(call.arguments))
                for index, call in enumerate(reply.tool_calls)
            )
            sent = replace(sent, content=before.strip(), tool_calls=named)
            for call, sampled in zip(named, reply.tool_calls, strict=True):
                self._by_call[call.id] = (number, sampled)
        self._replies.append(_Reply(sampled=reply, sent=sent))
        self._by_request[_digests(messages)[-1]].append(number)
        return sent

    def step(self, messages: Sequence[Message], *, tools: bool, same_tools: bool) -> Step:
        """What follows the last reply, by the next request and whether it declares tools, those of the last one."""
        number, before = len(self._replies) - 1, self._history
        self._history = after = self._read(messages, tools=tools)
        newest = after.units[-1] if after.units and after.units[-1].turn == number else None
        observed = () if newest is None else newest.results
        continues = (after.pinned, after.units[:-1]) == (before.pinned, before.units)
        asks = newest is not None and newest.pinned
        plain = newest is not None and newest.reply is self._replies[number].sampled
        if same_tools and continues and plain and all(message.role != "assistant" for message in observed):
            return Step(observations=observed, new_query=asks)
        reason = _reason(before, number, after, same_tools=same_tools)
        return Step(
            observations=observed,
            new_query=asks,
            rewritten=RewrittenHistory(history=after, by=AGENT, reason=reason),
        )

    def _read(self, messages: Sequence[Message], *, tools: bool) -> History:
        pinned, units, last = list[Message](), list[Unit](), -1
        for message, before in zip(messages, _digests(messages), strict=False):
            number = self._number(message, before, last) if message.role == "assistant" else None
            if number is not None:
                last = number
                units.append(self._unit(number, message))
            elif units:
                units[-1] = replace(units[-1], results=self._with_result(units[-1], message))
            else:
                pinned.append(self._shown(message))
        asking = (tools and self._asks(unit) for unit in units)
        return History(
            pinned=tuple(pinned),
            units=tuple(replace(unit, pinned=asks) for unit, asks in zip(units, asking, strict=True)),
        )

    def _asks(self, unit: Unit) -> bool:
        """Whether the user said something after a reply."""
        called = self._replies[unit.turn].sampled.tool_calls
        return not called and any(message.role == "user" for message in unit.results)

    def _number(self, message: Message, before: int, last: int) -> int | None:
        """Which reply a message is, of those after ``last``; None: none of them."""
        candidates = [number for number in self._by_request[before] if number > last]
        for number in reversed(candidates):
            if _same_text(message, self._replies[number].sent):
                return number
        if candidates:
            return candidates[-1]
        for call in message.tool_calls:
            if call.id in self._by_call and self._by_call[call.id][0] > last:
                return self._by_call[call.id][0]
        later = range(last + 1, len(self._replies)) if message.text.strip() else ()
        same = (number for number in later if _same_text(message, self._replies[number].sent))
        longer = (number for number in later if self._replies[number].sent.text and self._added(number, message))
        return next(same, next(longer, None))

    def _unit(self, number: int, message: Message) -> Unit:
        """The unit of a reply that came back, without its results."""
        sampled, sent = self._replies[number].sampled, self._replies[number].sent
        added, same_calls = self._added(number, message), _calls(message) == _calls(sent)
        if added == "" and same_calls:
            return Unit(turn=number, reply=sampled)
        if added and (same_calls or not message.tool_calls):
            return Unit(turn=number, reply=sampled, results=(Message(role="user", content=added),))
        return Unit(turn=number, reply=self._shown(message))

    def _added(self, number: int, message: Message) -> str | None:
        """The text after a reply in a message that begins with it; None: it does not."""
        text, reply = message.text.strip(), self._replies[number]
        starts = (was for was in (reply.sampled.text.strip(), reply.sent.text.strip()) if text.startswith(was))
        was = next(starts, None)  # with its stop string, which smolagents puts back
        return None if was is None else text[len(was) :].strip()

    def _with_result(self, unit: Unit, message: Message) -> tuple[Message, ...]:
        """The results of a unit with one more; after a text that the agent added to the reply, it is one message."""
        if message.role == "tool":
            number, call = self._by_call.get(message.tool_call_id or "", (None, None))
            if number == unit.turn and call is not None:
                return (*unit.results, replace(message, tool_call_id=call.id, name=call.name))
            message = Message(role="user", content=message.text)
        follows_user = message.role == "user" and len(unit.results) == 1 and unit.results[0].role == "user"
        if follows_user and unit.reply is self._replies[unit.turn].sampled:
            return (unit.results[0].followed_by(f"\n\n{message.text}"),)
        return (*unit.results, self._shown(message))

    def _shown(self, message: Message) -> Message:
        """A message that the policy did not sample, with its calls in its text as the policy would write them."""
        if message.role == "tool":
            return Message(role="user", content=message.text)
        if not message.tool_calls:
            return message
        form = self._format or Native()
        calls = (form.call(call.name, arguments_of(call)) for call in message.tool_calls)
        known = (self._by_call.get(call.id, (0, call))[1].id for call in message.tool_calls)
        renamed = (replace(call, id=known_id) for call, known_id in zip(message.tool_calls, known, strict=True))
        return replace(message, content="\n".join((message.text, *calls)).strip(), tool_calls=tuple(renamed))


def plain_messages(messages: Sequence[Message], tool_format: str) -> tuple[Message, ...]:
    """Messages of an agent as a policy reads those that it did not sample."""
    return AgentConversation(tool_format).begin(messages)


def _digests(messages: Sequence[Message]) -> list[int]:
    """Of no message, of the first, of the first two, and so on: equal for equal messages."""
    digests = [0]
    for message in messages:
        whole = (digests[-1], message.role, message.text.strip(), message.tool_calls, message.tool_call_id)
        digests.append(hash(whole))
    return digests


def _unquoted(arguments: str) -> str:
    """The JSON object of a call's arguments, which a model may write inside a JSON string."""
    value = strictjson.loads(arguments)
    return value if isinstance(value, str) else arguments


def _same_text(message: Message, sent: Message) -> bool:
    return (message.text.strip(), _calls(message)) == (sent.text.strip(), _calls(sent))


def _calls(message: Message) -> list[tuple[str, str, str]]:
    return [(call.id, call.name, repr(arguments_of(call))) for call in message.tool_calls]


def arguments_of(call: ToolCall) -> Mapping[str, object]:
    """The arguments of a call; what the policy wrote otherwise is one of them, as text."""
    try:
        return parsed_arguments(call.arguments)
    except ValueError:
        return {"arguments": call.arguments}


def _reason(before: History, newest: int, after: History, *, same_tools: bool) -> str:
    """What an agent did with its history and its newest reply, in words."""
    were, are = {unit.turn: unit for unit in before.units}, {unit.turn: unit for unit in after.units}
    changes = {
        "other tools": not same_tools,
        "other first messages": before.pinned != after.pinned,
        "replies left out": bool({*were, newest} - are.keys()),
        "replies brought back": bool(are.keys() - {*were, newest}),
        "replies or results changed": any(are[turn] != unit for turn, unit in were.items() if turn in are),
    }
    made = [name for name, true in changes.items() if true]
    return f"the agent rewrote its history: {', '.join(made) or 'the newest reply changed'}"
