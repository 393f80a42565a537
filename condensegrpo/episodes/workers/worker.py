"""The worker: builds players, plays the groups that its rank sends, and calls the sampler of the rank."""

import asyncio
import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import cast

from condensegrpo.core.errors import CondenseError, RolloutError, SamplerError
from condensegrpo.core.failures import PluginFailure, failure_of
from condensegrpo.core.protocols.sampler import AttentionQuery, NamedTensors, TokenAttention
from condensegrpo.core.shared_sequence import shared_ids
from condensegrpo.core.threads import awaited_in_thread
from condensegrpo.core.trajectory import Generation, SamplingParams, StopReason
from condensegrpo.episodes.boundary import EndEpisode
from condensegrpo.episodes.player import COUNT_SECONDS, LocalPlayer
from condensegrpo.episodes.workers.messages import (
    PLAIN_DATA,
    Answer,
    Method,
    Play,
    PlayReport,
    SamplerRequest,
    Withdraw,
)


class Requests:
    """The requests of a worker that wait for an answer of the rank."""

    def __init__(self, send: Callable[[object], None]) -> None:
        self._send = send
        self._sent = 0
        self._answers: dict[int, asyncio.Future[object]] = {}

    async def answer(self, model: str, method: Method, *arguments: object) -> object:
        """The answer to a request; a ``PluginFailure`` if the sampler failed."""
        self._sent += 1
        number, future = self._sent, asyncio.get_running_loop().create_future()
        self._answers[number] = future
        self._send(SamplerRequest(number, model, method, arguments))
        try:
            return await future
        except asyncio.CancelledError:
            self._send(Withdraw(number))
            raise
        finally:
            del self._answers[number]

    def receive(self, answer: Answer) -> None:
        """Receive an answer."""
        future = self._answers.get(answer.number)
        if future is not None and not future.done():
            future.set_result(answer.value)


@dataclass(slots=True)
class RemoteSampler:
    """The sampler of the rank. It also measures and attends if the rank's sampler does: the rank checks that before."""

    requests: Requests
    model: str = ""  # folder or Hub id of a frozen model of the rank, for a scorer; empty: the sampler
    version: int = 0  # when the play began; of a frozen model it never changes

    async def sample(self, prompt_ids: Sequence[int], params: SamplingParams) -> Generation:
        """One reply of the rank's sampler."""
        answer = await self.requests.answer(self.model, "sample", shared_ids(prompt_ids), params)
        if isinstance(answer, PluginFailure):
            raise EndEpisode.by(answer, StopReason.SAMPLER_ERROR)
        return cast(Generation, answer)

    async def measure(self, prompt_ids: Sequence[int], output_ids: Sequence[int]) -> Sequence[float]:
        """log π(output_ids[i] | prompt_ids, output_ids[:i]) for every i, (A,) nats at temperature 1."""
        answer = await self.requests.answer(self.model, "measure", tuple(prompt_ids), tuple(output_ids))
        return cast(Sequence[float], _checked(answer))

    async def attend(self, query: AttentionQuery) -> TokenAttention:
        """The attention of one query."""
        return cast(TokenAttention, _checked(await self.requests.answer(self.model, "attend", query)))

    def update_weights(self, named_tensors: NamedTensors, version: int) -> None:
        """The rank updates its sampler by itself."""
        raise NotImplementedError("a rollout worker holds no weights")

    def close(self) -> None:
        """Nothing is held."""


def _checked(answer: object) -> object:
    if isinstance(answer, PluginFailure):
        raise SamplerError(answer.message)
    return answer


OpenPlayer = Callable[[object, RemoteSampler], LocalPlayer]  # of the settings of a ``Setup``


class Worker:
    """Holds players by key, and plays with one of them at a time."""

    def __init__(self, open_player: OpenPlayer, send: Callable[[bytes], None]) -> None:
        """``send`` sends a pickled message to the rank."""
        self._open_player, self._send_pickle = open_player, send
        self._requests = Requests(self._send)
        self._sampler = RemoteSampler(self._requests)
        self._players: dict[int, LocalPlayer] = {}
        self._playing: asyncio.Task[None] | None = None

    def receive(self, data: bytes) -> None:
        """Receive a pickled message, on the running event loop."""
        try:
            message = pickle.loads(data)
        except Exception as error:  # such as a class that only the rank can import
            reading = f"reading problems in a rollout worker: {failure_of('', error)}"
            self._send_pickle(pickle.dumps(RolloutError(f"{reading}. {PLAIN_DATA}.")))
            return
        if isinstance(message, Answer):
            self._requests.receive(message)
        else:
            self._playing = asyncio.create_task(self._play(message))

    async def _play(self, play: Play) -> None:
        key, settings = play.setup
        self._sampler.version = play.version
        doing = "setting up"
        try:
            if key not in self._players:
                self._players[key] = self._open_player(settings, self._sampler)
            player, doing = self._players[key], "playing in"
            before = player.condensing_seconds
            await player.play(
                play.batch, samples=play.samples, run_seed=play.run_seed, step=play.step, on_scored=self._send
            )
            counts = await awaited_in_thread(player.counts, name="the counts of the condenser", seconds=COUNT_SECONDS)
            self._send(PlayReport(player.condensing_seconds - before, counts))
        except asyncio.CancelledError:  # the rank has closed the connection
            raise
        except CondenseError as error:
            self._send(error)
        except BaseException as error:  # the boundary to constructors of plug-ins, which may call sys.exit()
            self._send(RolloutError(f"{doing} a rollout worker: {failure_of('', error)}."))
        finally:
            self._playing = None

    def _send(self, message: object) -> None:
        """Send a message, unless it comes from an abandoned plug-in after its play: the rank does not read it."""
        if self._playing is not None:
            self._send_pickle(pickle.dumps(message, pickle.HIGHEST_PROTOCOL))
