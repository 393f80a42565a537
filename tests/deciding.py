"""A policy that decides what it sees: scripted replies, played through the engine: `from deciding import …`."""

import asyncio
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from conformance import PINNED
from formats import TOOL_FORMATS
from talk import Counting, engine, problem, said, shown

from condensegrpo.assembly.build import build_condenser
from condensegrpo.config.use import CondenserUse
from condensegrpo.core.condenser import Condenser
from condensegrpo.core.messages import History, Message, Unit
from condensegrpo.core.trajectory import Trajectory
from condensegrpo.episodes.engine import Engine
from condensegrpo.episodes.episode import run_episode
from condensegrpo.episodes.settings import CondenseSettings
from condensegrpo.episodes.toolcalls import Toolbox
from condensegrpo.samplers.scripted import ScriptedSampler

ASKING = "Sum up in few words."  # the template of summaries
SUMMARY = 'all done <tool>{"name": "branch", "args": {"description": "x"}}</tool>'  # a call in it is text


def call(tool: str, /, **arguments: object) -> str:
    return f"<tool>{json.dumps({'name': tool, 'args': arguments})}</tool>"


def build(name: str, **options: object) -> Condenser:
    """A condenser as a configuration builds it."""
    return build_condenser(CondenserUse(name=name, options=options))


def stages(*named: str | tuple[str, Mapping[str, Any]], net: Sequence[Mapping[str, Any]] = ()) -> Condenser:
    """A pipeline of condensers that the policy decides about, and rules after them."""
    made = [(each, {}) if isinstance(each, str) else each for each in named]
    always = [{"name": name, "over": 0, "options": dict(options)} for name, options in made]
    return build("pipeline", stages=[*always, *map(dict, net)])


def deciding(condenser: Condenser, replies: Sequence[str], **limits: Any) -> Engine:
    """An engine whose policy gives these replies, then an answer, and a summary whenever it is asked for one."""
    following = iter([*replies, "answer 1"])

    def reply(prompt_ids: Sequence[int]) -> list[int]:
        newest = shown(prompt_ids).rpartition("<|im_start|>user")[2]
        return said(SUMMARY if ASKING in newest else next(following))

    settings = {"max_context_tokens": 9000, "max_output_tokens": 400, "max_turns": 30, **limits}
    trigger = settings.pop("trigger", CondenseSettings(meter="turns"))
    base = engine(ScriptedSampler(reply), condenser=condenser, trigger=trigger, **settings)
    return base.offering(condenser.tools())


def played(condenser: Condenser, *replies: str, **limits: Any) -> Trajectory:
    """The trajectory of a policy that gives these replies."""
    made = deciding(condenser, replies, **limits)
    episode = run_episode(problem(), environment=Counting, engine=made, group_id="0", sample=0, seed=lambda turn: turn)
    return asyncio.run(episode)


def view(trajectory: Trajectory, turn: int) -> list[str]:
    """The texts of the replies in the context of a turn."""
    return [message.text for message in trajectory.turns[turn].context if message.role == "assistant"]


def answers(trajectory: Trajectory, turn: int) -> str:
    """What answered the reply of a turn, in one text."""
    return "\n".join(message.text for message in trajectory.turns[turn].observations)


def template(folder: Path) -> str:
    """The file of a template for summaries."""
    (folder / "ask.txt").write_text(ASKING)
    return str(folder / "ask.txt")


def past(condenser: Condenser, *calls: tuple[str, Mapping[str, object]] | None) -> History:
    """The history of a policy that made these calls, one in a turn; None: a turn with an observation alone."""
    history = History(pinned=PINNED)
    tools = condenser.tools()
    toolbox = Toolbox({tool.name: tool for tool in tools}, format=TOOL_FORMATS["tagged"])
    for turn, made in enumerate(calls):
        text = f"reply {turn}" if made is None else call(made[0], **made[1])
        given = asyncio.run(toolbox.run(toolbox.format.parse(text), history))
        results = given.messages or (Message(role="user", content=f"seen {turn} " + "x" * 40),)
        reply = Message(role="assistant", content=text, tool_calls=given.calls)
        history = history.add(Unit(turn=turn, reply=reply, results=tuple(results)))
    return history
