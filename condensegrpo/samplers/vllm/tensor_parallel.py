"""Tensor parallel in process: the ranks with one copy of the model step it together, each with its requests.

    rank 0   a, b ─┐                 ┌─▶ add 0/a 0/b 1/c, step ─▶ replies to a and b
                   ├─▶ every round ──┤
    rank 1   c    ─┘                 └─▶ add 0/a 0/b 1/c, step ─▶ reply to c

vLLM schedules by what was added and in which order (its ``external_launcher``), so all ranks compute the same step. A
rank takes part in the rounds also while it has no request.
"""

import time
import zlib
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from torch import distributed

from condensegrpo.core.errors import SamplerError
from condensegrpo.core.threads import DaemonThread
from condensegrpo.core.trajectory import Generation, SamplingParams
from condensegrpo.samplers.vllm.engine import VllmEngine
from condensegrpo.samplers.vllm.request import refused

IDLE_SECONDS = 0.005  # between two rounds without a request on any rank
CLOSE_SECONDS = 10.0  # that ``close`` waits for the other ranks, which may have failed

Outcome = Generation | SamplerError


@dataclass(frozen=True, slots=True)
class _Request:
    name: str
    prompt_ids: Sequence[int]
    params: SamplingParams | None  # None: the prompt is only read


@dataclass(frozen=True, slots=True)
class Command:
    """The work of a rank for the engine in a round, as all ranks receive it."""

    added: tuple[_Request, ...]
    removed: tuple[str, ...]
    pausing: bool  # the round is the last one if all ranks say so
    replies: int  # a checksum of all replies of the last step


# this rank's command ─▶ those of all ranks, in their order
ExchangeCommands = Callable[[Command], Sequence[Command]]


class Lockstep:
    """Adds requests to an engine and steps it, as all ranks do that share its model. All of them must pause, and close.

    All calls are made in the engine's thread.
    """

    def __init__(self, engine: VllmEngine, exchange: ExchangeCommands, index: int, thread: DaemonThread) -> None:
        """Start the rounds.

        Args:
            index: of this rank among those that share the model.
            thread: the engine's; rounds take turns with the calls that are submitted to it.
        """
        self._engine, self._exchange, self._index, self._thread = engine, exchange, index, thread
        self._added: list[_Request] = []  # not sent yet
        self._removed: list[str] = []  # likewise
        self._open: set[str] = set()  # requests of all ranks in the engine, as index/name
        self._finished: dict[str, Outcome] = {}  # requests of this rank whose replies ``step`` has not returned yet
        self._replies = 0
        self._failure: SamplerError | None = None
        thread.submit(self._take_part)

    def add(self, name: str, prompt_ids: Sequence[int], params: SamplingParams | None) -> None:
        """As ``VllmEngine``, in the next round."""
        self._added.append(_Request(name, prompt_ids, params))

    def abort(self, names: Sequence[str]) -> None:
        """Remove requests in the next round; no reply to them comes any more."""
        self._removed += names
        for name in names:
            self._finished.pop(name, None)

    def step(self) -> dict[str, Outcome]:
        """A round; returns the replies to this rank's requests since the last call."""
        self._round()
        finished, self._finished = self._finished, {}
        return finished

    def pause(self) -> None:
        """Wait until all ranks have come here: the engine is this rank's alone until the end of the call."""
        while self._round(pausing=True):
            pass

    def close(self) -> None:
        """Free the engine. If other ranks do not close theirs, it is left to the end of the process."""
        until = time.monotonic() + CLOSE_SECONDS
        with suppress(SamplerError):  # the rounds have ended: this rank or another one failed
            while self._round(pausing=True):
                if time.monotonic() > until:
                    return
        self._engine.close()

    def _take_part(self) -> None:
        """A round, and the next one after the calls that wait for the thread."""
        with suppress(SamplerError, RuntimeError):  # ``step`` raises the failure again; or the thread was closed
            self._round()
            self._thread.submit(self._take_part)

    def _round(self, *, pausing: bool = False) -> bool:
        """Send the other ranks the new requests, add those of all ranks and step; returns whether any rank goes on."""
        if self._failure is not None:
            raise self._failure
        try:
            return self._stepped(pausing)
        except Exception as error:  # the boundary to vLLM and to the other ranks
            text = f"stepping vLLM together with other ranks: {type(error).__name__}: {error}"
            self._failure = SamplerError(text)
            raise self._failure from error

    def _stepped(self, pausing: bool) -> bool:
        added, self._added = tuple(self._added), []
        removed, self._removed = tuple(self._removed), []
        commands = self._exchange(Command(added, removed, pausing, self._replies))
        if len({command.replies for command in commands}) > 1:
            raise SamplerError("the ranks sampled different replies in the same step")
        for index, command in enumerate(commands):
            names = {f"{index}/{name}" for name in command.removed}
            self._open -= names
            self._engine.abort(sorted(names))
            for request in command.added:
                if request.name not in command.removed:
                    self._enter(index, request)
        if all(command.pausing for command in commands):
            return False
        if self._open:
            self._deliver(self._engine.step())
        else:
            time.sleep(IDLE_SECONDS)
        return True

    def _enter(self, index: int, request: _Request) -> None:
        """Put a request of any rank into the engine; every rank does the same."""
        name = f"{index}/{request.name}"
        self._engine.wake()
        try:
            self._engine.add(name, request.prompt_ids, request.params)
        except Exception as error:  # the boundary to vLLM
            self._deliver({name: refused(request.prompt_ids, error)})
        else:
            self._open.add(name)

    def _deliver(self, outcomes: dict[str, Outcome]) -> None:
        self._open.difference_update(outcomes)
        ids = [
            (name, outcome.token_ids if isinstance(outcome, Generation) else ()) for name, outcome in outcomes.items()
        ]
        self._replies = zlib.crc32(repr(sorted(ids)).encode(), self._replies)
        prefix = f"{self._index}/"
        self._finished |= {name[len(prefix) :]: reply for name, reply in outcomes.items() if name.startswith(prefix)}


def lockstep(engine: VllmEngine, thread: DaemonThread) -> Lockstep:
    """The rounds of the ranks of this engine's tensor-parallel group; the engine was created in this thread."""
    from vllm.distributed.parallel_state import get_tp_group

    group = get_tp_group()

    def exchange(command: Command) -> list[Command]:
        commands = [command] * group.world_size
        distributed.all_gather_object(commands, command, group=group.cpu_group)
        return commands

    return Lockstep(engine, exchange, group.rank_in_group, thread)
