"""The tasks of the study ``methods``: the same problems and the same expert, whose decisions are those of a method.

    reads    the task ``facts``: what is asked for stands on an early page, and the answer is due at the end
    coins    TextWorld's coin collector: a walk through rooms, for which the newest room and the last step are enough

An expert sees what the policy would see. It acts by the same rule under every method, and also

    none     does nothing else
    state    begins every reply with what is known, <note> red:7 </note>
    prune    names the turns in view, but the newest, once ``AFTER`` pages or rooms are in view
    budget   the same, once its meter shows less room than the next page or room may need
    fold     opens a branch and returns from it after ``AFTER`` pages or rooms
    compact  asks for a summary once ``AFTER`` pages or rooms are in view
    memory   writes what is asked for into the memory once it was read

``Short`` is a tool format of single words for models that learn from nothing: <call> prune 0 1 : red:7 </call>.
"""

import json
import random
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from condensegrpo.core.condenser import Request
from condensegrpo.core.messages import OMITTED, Message, ToolCall
from condensegrpo.core.protocols.environment import Environment, Step
from condensegrpo.core.protocols.task import Problem
from condensegrpo.episodes.toolformats import Malformed, ToolFormat, parsed_calls
from condensegrpo.integrations.gym import action_in
from condensegrpo.integrations.textworld import TextWorld
from condensegrpo.studies.tasks.facts import KEYS, REPORT, FactsTask

Method = Literal["none", "state", "prune", "budget", "fold", "compact", "memory"]
AFTER = 3  # pages or rooms in view before a decision
NOTHING = "none"  # what a note says while nothing is known
NUMBERS, TURNS = 1000, 40  # of tokens and of turns that the vocabulary knows

_FACT = re.compile(rf"\b(?:{'|'.join(KEYS)}):\d")
_PAGE = re.compile(r"^p(\d+) ")
_TURN = re.compile(r"\[turn (\d+)(?:\]|: )")  # the line of a meter
_LEFT = re.compile(r", (\d+) left")
_PRUNED = re.compile(r"up to (\d+) omitted, replaced")
_CALLED = re.compile(r"<call> (\w+)")


class Short(ToolFormat):
    """A call of single words: a name, numbers of turns, and behind a colon a text."""

    opening = "<call>"

    def parse(self, text: str) -> tuple[ToolCall | Malformed, ...]:
        """All calls of a reply."""
        return parsed_calls(text, "<call>", self._read)

    def result(self, call_id: str, name: str, text: str) -> Message:
        """The result in one word: the pages of its text would cost more than what the calls save."""
        return Message(role="tool", content="Error:" if "Error:" in text else "ok", tool_call_id=call_id, name=name)

    def instructions(self, schemas: Sequence[Mapping[str, object]]) -> str:
        """One word: the demonstrations show the calls."""
        return "calls" if schemas else ""

    def _read(self, text: str, start: int, opening: str, call_id: str) -> tuple[ToolCall | Malformed, int]:
        content, closed, _ = text[start:].partition("</call>")
        head, _, said = content.partition(" : ")
        name, *turns = head.split() or [""]
        if not closed or not all(turn.isdecimal() for turn in turns):
            return Malformed(reason="wanted <call> name turns : text </call>"), start + len(content)
        said = said.strip()
        arguments: dict[str, object] = {
            "prune": {"turns": [int(turn) for turn in turns], "note": said},
            "branch": {"description": said},
            "return": {"message": said},
            "memory_write": {"name": "fact", "text": said},
        }.get(name, {})
        end = start + len(content) + len(closed)
        return ToolCall(id=call_id, name=name, arguments=json.dumps(arguments)), end


@dataclass(frozen=True, slots=True, kw_only=True)
class Reads(FactsTask):
    """The task ``facts`` with answers such as ``red:7``, as the page has them."""

    method: Method = "none"

    def draw(self, rng: random.Random, label: str) -> Problem:
        """A problem of ``facts``."""
        problem = FactsTask.draw(self, rng, label)
        return replace(problem, answer=str(problem.answer).replace(" ", ":"))

    def environment(self, problem: Problem) -> "Unnoted":
        """An episode whose replies may begin with a note."""
        return Unnoted(FactsTask.environment(self, problem), self.method)

    def expert(self, problem: Problem) -> "Decider":
        """The reader."""
        return Decider(
            self.method, act=self._act, known=lambda context: f"p{_read(context)} {known_fact(context)}", room=60
        )

    def corpus(self) -> Iterable[str]:
        """Every word of the task and of the methods."""
        yield "p0"
        yield from FactsTask.corpus(self)
        yield from words_of_methods()

    def _act(self, context: Sequence[Message]) -> str:
        """Read on; then answer, or where the fact is out of view read the early pages again, one after another."""
        pages = [(int(match[1]), message.text) for message in context if (match := _PAGE.match(message.text))]
        newest, text = pages[-1] if pages else (0, "")
        known = known_fact(context)
        if REPORT not in text.split():
            return f"<read> p{_read(context) + 1} </read>"
        if known != NOTHING:
            return f"<answer> {known} </answer>"
        early = int(self.pages * self.early)
        return f"<read> p{newest + 1 if newest < early else 1} </read>"


@dataclass(kw_only=True, eq=False)
class Coins(TextWorld):
    """The coin collector; what is known is the last command."""

    method: Method = "none"

    def __post_init__(self) -> None:
        TextWorld.__post_init__(self)
        self.system = self.method

    def expert(self, problem: Problem) -> "Decider":
        """The player of the walkthrough, which decides as well."""
        player = TextWorld.expert(self, problem)

        def act(context: Sequence[Message]) -> str:
            lost = not _seen(context) and any("<call> return" in message.text for message in context)
            return "<action> look </action>" if lost else player.reply(context)

        return Decider(self.method, act=act, known=last_command, room=150)

    def corpus(self) -> Iterable[str]:
        """Every word of the games and of the methods."""
        return [*TextWorld.corpus(self), *words_of_methods()]


@dataclass(frozen=True, slots=True)
class Decider:
    """An expert: decides by the method where that is due, and acts otherwise."""

    method: Method
    act: Callable[[Sequence[Message]], str]
    known: Callable[[Sequence[Message]], str]  # of a context, what a note keeps
    room: int  # tokens that the next page or room may need, with a call

    def reply(self, context: Sequence[Message]) -> str:
        """A call, or the action."""
        known = self.known(context)
        if self.method == "state":
            return f"<note> {known} </note> {self.act(context)}"
        call = self._call(context, known)
        return f"<call> {call} </call>" if call else self.act(context)

    def write(self, request: Request) -> str:
        """A summary."""
        return f"<note> {self.known([message for unit in request.units for message in unit.messages])} </note>"

    def _call(self, context: Sequence[Message], known: str) -> str | None:
        seen = _seen(context)
        calls = [
            match[1] for message in context if message.role == "assistant" for match in _CALLED.finditer(message.text)
        ]
        left = next((int(n) for message in reversed(context) for n in _LEFT.findall(message.text)), self.room)
        due = len(seen) >= AFTER if self.method == "prune" else self.method == "budget" and left < self.room
        if due and len(seen) > 1 and seen[-1] is context[-1]:
            turns = sorted({int(turn) for m in context for turn in (*_TURN.findall(m.text), *_PRUNED.findall(m.text))})
            return f"prune {' '.join(map(str, turns[:-1]))} : {known}"
        if self.method == "compact" and len(seen) >= AFTER:
            return "compact"
        if self.method == "fold":
            if not calls or calls[-1] == "return":
                return "branch : on"
            last = max(index for index, message in enumerate(context) if "<call> branch" in message.text)
            inside = [message for message in _seen(context) if any(message is other for other in context[last:])]
            return f"return : {known}" if len(inside) >= AFTER else None
        unwritten = _FACT.search(known) and not any(
            "memory_write" in m.text or "[Your notes]" in m.text for m in context
        )
        return f"memory_write : {known}" if self.method == "memory" and unwritten else None


class Unnoted(Environment):
    """An environment that does not see the note before an action."""

    def __init__(self, environment: Environment, method: Method) -> None:
        self._environment, self._method = environment, method

    async def start(self) -> tuple[Message, ...]:
        """The method, as the system message, and what the environment says."""
        return Message(role="system", content=self._method), *await self._environment.start()

    async def step(self, reply: Message) -> Step:
        """As of the environment, for what follows the note."""
        return await self._environment.step(replace(reply, content=reply.text.rpartition("</note>")[2].strip()))


def known_fact(context: Sequence[Message]) -> str:
    """The fact with the key that is asked for, wherever a context has it."""
    text = " ".join(message.text for message in context)
    key = next((message.text for message in context if message.role == "user"), NOTHING).split()[-1]
    facts = [fact for fact in _FACT.findall(text) if key not in KEYS or fact.startswith(f"{key}:")]
    return facts[-1] if facts else NOTHING


def _read(context: Sequence[Message]) -> int:
    """The number of pages that were read, by a context or its notes."""
    return max((int(page) for message in context for page in re.findall(r"\bp(\d+)", message.text)), default=0)


def last_command(context: Sequence[Message]) -> str:
    """The newest command of a context, or that of its newest note."""
    for message in reversed(context):
        if message.role == "assistant":
            note = re.search(r"(?:<note>| :) ([\w ]+?) (?:</note>|</call>)", message.text)
            said = action_in(message.text) if "<action>" in message.text else note and note[1]
            if said and said != "look":
                return said
    return NOTHING


def words_of_methods() -> Iterator[str]:
    """What methods write and what condensers show."""
    yield "none state prune budget fold compact memory calls"
    yield f"<note> {NOTHING} </note> <call> prune branch return compact memory_write : on ok Error: </call> note"
    yield "[Your notes] fact: [turn , tool result observation omitted: tokens]"
    yield "turns turn up to omitted, replaced by your note above:"
    yield OMITTED
    yield "[turn 0: 1 of 2 context tokens used, 1 left]"
    yield " ".join(map(str, range(NUMBERS)))
    yield from (f"{turn}, {turn}] {turn}:" for turn in range(TURNS))


def _seen(context: Sequence[Message]) -> Sequence[Message]:
    """The pages and rooms in view, those of the pinned messages not counted."""
    question = next(index for index, message in enumerate(context) if message.role == "user")
    return [m for m in context[question + 1 :] if _PAGE.match(m.text) or (m.role == "user" and "-=" in m.text)]
