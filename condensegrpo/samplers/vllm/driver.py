"""Drives vLLM's engine in one thread for a queue of requests: each enters when it arrives and leaves when it is done.

Between requests the engine sleeps, wakes and loads weights.

    caller          in_new_thread(VllmEngine) ─▶ EngineDriver.submit ─▶ load ─▶ sleep ─▶ close
    its thread      creates it                   steps it               loads   sleeps   closes

vLLM keeps the stream of the thread in which it samples first, at its creation. The next step in a thread with another
stream is computed on that one, while its tokens are copied on the first without waiting for them.

**Tensor parallel.** The ranks with one copy of the model step it together, each with its requests:

    rank 0   a, b ─┐                 ┌─▶ add 0/a 0/b 1/c, step ─▶ replies to a and b
                   ├─▶ every round ──┤
    rank 1   c    ─┘                 └─▶ add 0/a 0/b 1/c, step ─▶ reply to c

vLLM schedules by what was added and in which order (its ``external_launcher``), so all ranks compute the same step. A
rank takes part in the rounds also while it has no request. A rank with a model of its own has rounds with itself alone.
"""

import atexit
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from itertools import count
from typing import NamedTuple, TypeVar

import torch
from torch import distributed

from condensegrpo.core.errors import SamplerError
from condensegrpo.core.protocols.sampler import NamedTensors
from condensegrpo.core.request_queue import Outcomes, QueuedRequest, RequestQueue
from condensegrpo.core.threads import DaemonThread
from condensegrpo.core.trajectory import FinishReason, Generation, SamplingParams
from condensegrpo.learner.devices import on_this_device, synchronize
from condensegrpo.samplers.vllm.engine import VllmEngine

STUCK_SECONDS = 600.0  # a step that takes longer hangs: its requests fail
CLOSE_SECONDS = 30.0  # that ``close`` and the end of the process wait for the thread
RANKS_SECONDS = 10.0  # of these, for the ranks that share the model, which may have failed
IDLE_SECONDS = 0.005  # between two rounds without a request on any rank
ABANDONED = Generation(token_ids=(), logprobs=(), finish=FinishReason.ABORT)

E = TypeVar("E")
_Prompt = tuple[Sequence[int], SamplingParams | None]  # without parameters the prompt is only read
_Request = QueuedRequest[_Prompt, Generation]


class NamedRequest(NamedTuple):
    """A request as all ranks that share a model know it."""

    name: str  # index of its rank/number
    prompt_ids: Sequence[int]
    params: SamplingParams | None  # None: the prompt is only read


class Command(NamedTuple):
    """The work of a rank for the engine in a round, as all ranks receive it."""

    added: tuple[NamedRequest, ...]
    removed: tuple[str, ...]
    pausing: bool  # the round computes nothing if all ranks say so
    replies: int  # a checksum of all replies so far


# this rank's command ─▶ those of all ranks, in their order
ExchangeCommands = Callable[[Command], Sequence[Command]]


def in_new_thread(create: Callable[[], E]) -> tuple[E, DaemonThread]:
    """An engine, created in a new thread on this thread's device."""
    thread = DaemonThread("vllm")
    atexit.register(thread.join, CLOSE_SECONDS)  # the process would abort while the thread is in torch's code
    atexit.register(thread.close)  # before
    try:
        thread.submit(partial(_begin, on_this_device())).result()
        return thread.submit(create).result(), thread
    except BaseException:
        thread.close()
        raise


class EngineDriver:
    """An engine and the requests that are in it. All calls of the engine are made in its thread."""

    def __init__(
        self, engine: VllmEngine, thread: DaemonThread, exchange: ExchangeCommands | None = None, index: int = 0
    ) -> None:
        """Take over an engine that was created in the thread.

        Args:
            exchange: with the ranks that share the model, which all must load, sleep and close; None: there are none.
            index: of this rank among them.
        """
        self._engine, self._thread, self._exchange, self._index = engine, thread, exchange, index
        self._dropped = False  # the weights, when it was put to sleep
        self._numbers = count()
        self._requests: dict[str, _Request] = {}  # of this rank, in the engine, by their names there
        self._open = set[str]()  # requests of all ranks in the engine
        self._finished = list[tuple[_Request, Generation | SamplerError]]()  # of this rank, not handed to the queue yet
        self._replies = 0
        self._failure: SamplerError | None = None  # of a round with other ranks: no further one is possible
        self._closed = False
        self._queue = RequestQueue(
            drive=self._step,
            worker=thread,
            failure=lambda error, requests: SamplerError(
                f"stepping vLLM with {requests} requests under way: {type(error).__name__}: {error}"
            ),
            call_seconds=STUCK_SECONDS,
        )
        if exchange is not None:
            thread.submit(self._take_part)

    async def submit(self, prompt_ids: Sequence[int], params: SamplingParams | None) -> Generation:
        """The reply to a prompt; without ``params`` the log-probabilities of the prompt itself.

        Cancelling the caller takes its request out of the engine and affects no other request.
        """
        return await self._queue.submit((prompt_ids, params))

    def load(self, named_tensors: NamedTensors, version: int) -> None:
        """Hand new weights to the engine."""
        if self._queue.open:
            raise SamplerError(
                f"updating the sampler's weights to version {version}: {self._queue.open} requests are under way, and "
                f"their replies would be of two policies. Await them first."
            )
        with ExitStack() as paused:
            with _in_time("waiting for the last step before an update of the weights"):
                paused.enter_context(self._queue.paused(STUCK_SECONDS))
            synchronize()  # the learner's stream, for the engine's
            try:
                self._thread.submit(partial(self._load, named_tensors)).result()
            finally:
                synchronize()  # the engine's stream, for the learner's

    def sleep(self, *, keep_weights: bool) -> None:
        """Free the GPU until the next request or update, or until the next update if the weights are dropped."""
        asleep = self._thread.submit(partial(self._sleep, keep_weights=keep_weights))
        with _in_time("putting vLLM to sleep"):
            asleep.result(timeout=STUCK_SECONDS)

    def close(self) -> None:
        """Free the engine and end the thread. Later requests fail. May be called twice."""
        if self._closed:
            return
        self._closed = True
        closed = self._thread.submit(self._close)
        self._thread.close()
        with suppress(TimeoutError):  # it hangs: left to the end of the process
            closed.result(timeout=CLOSE_SECONDS)
        self._queue.close()

    def _load(self, named_tensors: NamedTensors) -> None:
        left = tuple(self._requests)  # of a step that failed
        self._requests.clear()
        self._pause(removed=left)
        self._engine.wake(["weights"])
        self._engine.load(named_tensors)
        self._dropped = False
        self._engine.wake()  # last: so the learner's copies of weights never lie beside keys and values

    def _sleep(self, *, keep_weights: bool) -> None:
        if not self._engine.asleep:
            self._pause()
            self._engine.sleep(keep_weights=keep_weights)
            self._dropped = not keep_weights

    def _close(self) -> None:
        """Free the engine. If the ranks that share it do not close it, it is left to the end of the process."""
        until = time.monotonic() + RANKS_SECONDS
        with suppress(SamplerError):  # the rounds have ended: this rank or another one failed
            while self._round(pausing=True):
                if time.monotonic() > until:
                    return
        self._engine.close()

    def _step(self, new: Sequence[_Request]) -> Outcomes[_Prompt, Generation]:
        """Driver of the queue: a round, which new requests join and abandoned ones leave."""
        if self._dropped:
            raise SamplerError("the weights were dropped when vLLM was put to sleep, and no new ones were sent since")
        removed = tuple(name for name, request in self._requests.items() if request.abandoned())
        for name in removed:
            yield self._requests.pop(name), ABANDONED
        added = tuple(NamedRequest(f"{self._index}/{next(self._numbers)}", *request.value) for request in new)
        self._requests |= {each.name: request for each, request in zip(added, new, strict=True)}
        try:
            self._round(added, removed)
        finally:  # what was refused or done before a failure
            finished, self._finished = self._finished, []
            yield from finished

    def _pause(self, *, removed: tuple[str, ...] = ()) -> None:
        """Wait until all ranks have come here: the engine is this rank's alone until the end of the call."""
        while self._round(removed=removed, pausing=True):
            removed = ()

    def _take_part(self) -> None:
        """A round, and the next one after the calls that wait for the thread."""
        with suppress(SamplerError, RuntimeError):  # ``_step`` raises the failure again; or the thread was closed
            self._round()
            self._thread.submit(self._take_part)

    def _round(
        self, added: tuple[NamedRequest, ...] = (), removed: tuple[str, ...] = (), *, pausing: bool = False
    ) -> bool:
        """Add and remove the requests of all ranks, and step; returns whether any rank goes on."""
        if self._failure is not None:
            raise self._failure
        command = Command(added, removed, pausing, self._replies)
        if self._exchange is None:
            return self._stepped([command])
        try:
            commands = self._exchange(command)
            if len({command.replies for command in commands}) > 1:
                raise SamplerError("the ranks sampled different replies in the same step")
            return self._stepped(commands)
        except Exception as error:  # the boundary to vLLM and to the other ranks
            text = f"stepping vLLM together with other ranks: {type(error).__name__}: {error}"
            self._failure = SamplerError(text)
            raise self._failure from error

    def _stepped(self, commands: Sequence[Command]) -> bool:
        """The engine's part of a round: the same calls on every rank."""
        for command in commands:
            self._open.difference_update(command.removed)
            self._engine.abort(command.removed)
        if all(command.pausing for command in commands):  # without a wake-up: it may be closed for lack of memory
            return False
        added = [request for command in commands for request in command.added]
        if added or self._open:
            self._engine.wake()
        for request in added:
            try:
                self._engine.add(*request)
            except Exception as error:  # the boundary to vLLM: a refusal ends this request alone
                tokens = len(request.prompt_ids)
                text = f"handing vLLM a prompt of {tokens} tokens: {type(error).__name__}: {error}"
                self._deliver({request.name: SamplerError(text)})
            else:
                self._open.add(request.name)
        if self._open:
            self._deliver(self._engine.step())
        else:
            time.sleep(IDLE_SECONDS)
        return True

    def _deliver(self, outcomes: Mapping[str, Generation | SamplerError]) -> None:
        self._open.difference_update(outcomes)
        ids = [(name, reply.token_ids if isinstance(reply, Generation) else ()) for name, reply in outcomes.items()]
        self._replies = zlib.crc32(repr(sorted(ids)).encode(), self._replies)
        of_this_rank = [name for name in outcomes if name in self._requests]
        self._finished += [(self._requests.pop(name), outcomes[name]) for name in of_this_rank]


def ranks_of_model() -> tuple[ExchangeCommands, int]:
    """The exchange of the ranks that share this thread's engine, and the index of this rank among them."""
    from vllm.distributed.parallel_state import get_tp_group

    group = get_tp_group()

    def exchange(command: Command) -> list[Command]:
        commands = [command] * group.world_size
        distributed.all_gather_object(commands, command, group=group.cpu_group)
        return commands

    return exchange, group.rank_in_group


def _begin(use_device: Callable[[], None]) -> None:
    use_device()
    # OpenMP keeps a number of threads per thread, and vLLM reads this thread's first
    torch.set_num_threads(torch.get_num_threads())


@contextmanager
def _in_time(doing: str) -> Iterator[None]:
    """Turn the TimeoutError of a wait for the worker into an error that says what was waited for."""
    try:
        yield
    except TimeoutError as error:
        raise SamplerError(
            f"{doing}: vLLM did not finish within {STUCK_SECONDS:g} seconds. It hangs: end the process and resume the "
            f"run."
        ) from error
