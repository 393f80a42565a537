"""The HTTP client of one vLLM server: requests and the parsing of replies. Token ids in, token ids out.

Every call has a time limit. For its errors see ``samplers/http_client.py``.
"""

import asyncio
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple
from zlib import crc32

from condensegrpo.core.errors import SamplerError, ServerUnreachable
from condensegrpo.core.trajectory import Generation, SamplingParams
from condensegrpo.samplers.http_client import Body, HttpClient, Json, reason
from condensegrpo.samplers.vllm.request import FINISH, PicturePrompts, mismatch, read_logprob, sampling_parameters
from condensegrpo.samplers.vllm.settings import ADAPTERS
from condensegrpo.samplers.vllm_server.server import TOKEN_VARIABLE

ENGINE_HEADER = "X-data-parallel-rank"  # vLLM's: the engine that computes a request
SHORT_SECONDS = 30.0  # time limit of calls that need no computation


class Description(NamedTuple):
    """A server's model and settings, as it reports them."""

    shape: Mapping[str, str]  # see server.shape_of
    logprobs_mode: str
    max_model_len: int  # tokens of prompt and output together
    world_size: int  # processes of an engine, one a GPU
    lora_rank: int  # of the largest adapters that it computes; 0: none
    nccl: bool  # whether it receives weights over NCCL
    engines: int = 1  # with a copy of the model each (--data-parallel-size)


class Reply(NamedTuple):
    """A generation and the labels of the weights that it was sampled with."""

    generation: Generation
    labels: tuple[str, ...]  # of each span of tokens, in order


class ServerClient(HttpClient):
    """The calls of one server. Use it, and close it, in one event loop."""

    def __init__(self, url: str, token: str, *, pictures: PicturePrompts | None = None) -> None:
        """``pictures``: makes the prompts that show pictures; None: there are none."""
        self._engines = 1  # until it is described
        self._pictures = pictures
        self._sent = set[str]()  # hashes of pictures that it was sent; it may have dropped some
        super().__init__(
            url,
            token,
            key_advice=f"Set {TOKEN_VARIABLE} to the server's token.",
            route_advice="Wanted a server that `condensegrpo serve` started, or one with its flags "
            "(docs/how-to/sample-with-vllm.md).",
        )

    async def healthy(self) -> bool:
        """Whether the server answers and its engine runs."""
        try:
            status, _ = await self.exchange("GET", "/health", None, SHORT_SECONDS)
        except ServerUnreachable:
            return False
        return status == 200

    async def describe(self, seconds: float) -> Description:
        """The model and settings of the server; all its workers report the same, after the step that they compute."""
        reply = await self._rpc("condensegrpo_describe", seconds=seconds)
        description = Description(**reply["results"][0])
        self._engines = description.engines
        return description

    async def weights_label(self) -> str:
        """The label of the current weights; ``default``: those of the server's start."""
        return str((await self.call("GET", "/weight_info", None, SHORT_SECONDS))["weight_version"])

    async def load_weights(self, folder: str, seconds: float) -> None:
        """Load the weights of a folder that the server can read; ``renew`` is to follow."""
        await self._rpc("condensegrpo_load", folder, seconds=seconds)

    async def load_adapters(self, folder: str, seconds: float) -> None:
        """Load the adapters of a PEFT folder in place of the former ones; ``renew`` is to follow."""
        route, body = "/v1/load_lora_adapter", {"lora_name": ADAPTERS, "lora_path": folder, "load_inplace": True}
        status, text = await self._order("the adapters", route, body, seconds)
        if status != 200:  # with 200 it answers in words
            self.read(route, status, text)

    async def renew(self, label: str) -> None:
        """Drop what the old weights computed, keys, values and features of pictures, and set the label of the new ones.

        Abandoned requests may still run: they must not keep the old blocks alive.
        """
        reset = await self.call("POST", "/reset_prefix_cache?reset_running_requests=true", None, SHORT_SECONDS)
        if not reset.get("success"):
            raise SamplerError(f"updating the weights of {self.url}: its prefix cache could not be reset; see its log")
        if self._pictures is not None:
            await self.call("POST", "/reset_encoder_cache", None, SHORT_SECONDS)
        await self.call("POST", "/update_weight_version", {"new_version": label}, SHORT_SECONDS)

    async def generate(
        self, prompt_ids: Sequence[int], params: SamplingParams, seconds: float, *, adapters: bool = False
    ) -> Reply:
        """Sample one reply, with the adapters or without, in the trajectory's engine of a data-parallel server.

        The server is sent the pictures of the prompt that it does not know.
        """
        body: Json = {"token_ids": list(prompt_ids), "sampling_params": sampling_parameters(params)}
        body |= {"model": ADAPTERS} if adapters else {}
        engine = crc32(params.trajectory.encode()) % self._engines
        headers = {} if self._engines == 1 else {ENGINE_HEADER: str(engine)}
        pictures, media = self._pictures, params.media
        if media and pictures is None:
            raise SamplerError("sampling a reply to a prompt with pictures: the model is not shown any")

        async def answer(known: Collection[str]) -> Json:
            shown: Json = {}
            if media and pictures is not None:
                shown = await asyncio.to_thread(pictures.request, prompt_ids, media, known=known)
            return await self.call("POST", "/inference/v1/generate", body | shown, seconds, headers)

        known = self._sent.intersection(media)
        try:
            answered = await answer(known)
        except ServerUnreachable:  # perhaps of a picture that it lost: the retry sends all
            self._sent.difference_update(media)
            raise
        except SamplerError:  # such as of a picture that the server has dropped
            if not known:
                raise
            answered = await answer(())
        self._sent.update(media)
        if media and (fault := mismatch(prompt_ids, answered.get("prompt_token_ids") or ())):
            raise fault
        return reply_of(answered)

    async def _rpc(self, method: str, *arguments: str, seconds: float) -> Json:
        body = {"method": method, "args": arguments, "timeout": seconds}
        return self.read("/collective_rpc", *await self._order(method, "/collective_rpc", body, seconds))

    async def _order(self, what: str, route: str, body: Body, seconds: float) -> tuple[int, str]:
        """Status and text of an answer; SamplerError where the server runs, and its workers refused."""
        status, text = await self.exchange("POST", route, body, seconds)
        if status >= 500 and await self.healthy():
            raise SamplerError(f"asking {self.url} for {what}: {reason(text)}")
        return status, text


def reply_of(body: Json) -> Reply:
    """The reply in an answer."""
    try:
        choice = body["choices"][0]
        generation = Generation(
            token_ids=tuple(choice["token_ids"]),
            logprobs=tuple(read_logprob(entry["logprob"]) for entry in choice["logprobs"]["content"]),
            finish=FINISH[choice["finish_reason"]],
        )
        labels = tuple(span["version"] for span in choice["weight_versions"] or ())
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise SamplerError(
            f"reading a server's reply: {type(error).__name__}: {error}; wanted vLLM 0.32's reply to "
            f"/inference/v1/generate"
        ) from error
    return Reply(generation=generation, labels=labels)
