"""The samplers ``openai`` and ``openai_chat``: any model behind an OpenAI-compatible endpoint, as it is.

    openai        POST <url>/completions         token ids ─▶ token ids and log-probabilities, as they were sampled
    openai_chat   POST <url>/chat/completions    messages  ─▶ text, tokenised again, without log-probabilities

Their weights cannot be updated: they are for evaluations, rollouts and ``condensegrpo proxy``, not for training.
"""

import asyncio
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, fields
from functools import partial
from typing import Annotated, Any, Self
from urllib.parse import urlsplit
from weakref import WeakKeyDictionary

from annotated_types import Ge

from condensegrpo.core.credentials import has_credentials
from condensegrpo.core.errors import SamplerError
from condensegrpo.core.messages import Message
from condensegrpo.core.protocols.sampler import Sampler
from condensegrpo.core.trajectory import FinishReason, Generation, SamplingParams
from condensegrpo.episodes.encoding import LARGE
from condensegrpo.learner.model_folder import load_tokenizer
from condensegrpo.samplers.http_client import HttpClient, Json, retried
from condensegrpo.samplers.vllm.request import FINISH, read_logprob
from condensegrpo.samplers.vllm.settings import RequestSettings

REQUESTS = RequestSettings(retries=6)
PAUSE_SECONDS = 0.5  # before the first retry of a request; doubled before each further one
CHAT_FINISH = {  # of several vendors
    **dict.fromkeys(("stop", "eos", "end_turn", "stop_sequence", "tool_calls", "function_call"), FinishReason.STOP),
    **dict.fromkeys(("length", "max_tokens", "model_length", "max_output_tokens"), FinishReason.LENGTH),
}
WITHOUT_TEMPERATURE = "For a model that takes no temperature set sampler.options.fields={temperature: null}."
LONGER = 4  # times ``max_tokens`` that a reply may be longer: another tokenizer may have counted it
CHARACTERS = 64  # of a token, on average, at most
WHOLE = {"top_p": 1.0, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0}  # whatever a model folder sets


@dataclass(eq=False)
class _ServedModel(Sampler):
    """A model and its endpoint, for both samplers. A connection lasts as long as its request."""

    url: str  # of the API, such as http://localhost:8000/v1
    model: str  # its name at the endpoint
    _: KW_ONLY
    key_variable: str | None = None  # environment variable with the key; None: no key is sent
    concurrency: Annotated[int, Ge(1)] = 64  # open requests at one time
    requests: RequestSettings = REQUESTS  # time limit and retries of a request
    fields: Mapping[str, Any] | None = None  # of every request's body, beside or in place of others; null removes one
    _limit: str = field(default="max_tokens", init=False)  # the name of the field

    def __post_init__(self) -> None:
        self.check_options(url=self.url, key_variable=self.key_variable)
        # a semaphore belongs to one event loop, and every evaluation has its own
        self._slots = WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore]()

    @staticmethod
    def check_options(*, url: str, key_variable: str | None = None, **_: object) -> None:
        """Check the address and the key without a request; ValueError says what is wrong."""
        if has_credentials(url):
            raise ValueError("url holds a user or password; put the key into an environment variable (key_variable)")
        if urlsplit(url).scheme not in ("http", "https") or not urlsplit(url).netloc:
            raise ValueError(f"url is {url!r}, wanted one such as http://localhost:8000/v1")
        if key_variable is not None and not os.environ.get(key_variable):
            raise ValueError(f"the environment variable {key_variable} (key_variable) is not set")

    @staticmethod
    def check_training() -> None:
        """Refuse: see ``Sampler``."""
        raise ValueError(
            "whose model cannot be given new weights. Train with sampler.name=vllm_server, vllm or transformers; "
            "condensegrpo eval, eval --compare and proxy take this one"
        )

    def client(self) -> Callable[[], Self]:
        """A call that opens the same sampler in another process."""
        options = {each.name: getattr(self, each.name) for each in fields(self) if each.init}
        return partial(type(self), **options)

    async def _choice(self, route: str, body: Json, *, max_tokens: int, temperature: float) -> Json:
        """The first choice of an answer; SamplerError if there is none after all attempts.

        A model that wants ``max_completion_tokens`` in place of ``max_tokens`` says so, and gets it from then on.
        """
        sampling = {self._limit: max_tokens, "temperature": temperature}
        fields = {"model": self.model, **sampling, **body, **(self.fields or {})}
        sent = {name: value for name, value in fields.items() if value is not None}
        try:
            answer = await self._answer(route, sent)
        except SamplerError as error:
            if "max_completion_tokens" in str(error) and self._limit == "max_tokens":
                self._limit = "max_completion_tokens"
                return await self._choice(route, body, max_tokens=max_tokens, temperature=temperature)
            if "temperature" in str(error) and "temperature" in sent:
                raise SamplerError(f"{error}. {WITHOUT_TEMPERATURE}") from error
            raise
        try:
            choice: Json = dict(answer["choices"][0])
        except (LookupError, TypeError, ValueError) as error:
            raise SamplerError(f"asking {self.url}{route}: the answer holds no completion: {answer!r:.200}") from error
        return choice

    async def _answer(self, route: str, sent: Json) -> Json:
        client = HttpClient(
            self.url,
            os.environ.get(self.key_variable, "") if self.key_variable else "",
            key_advice="Name the environment variable that holds the key in sampler.options.key_variable.",
            route_advice="Check sampler.options.url, which mostly ends in /v1, and sampler.options.model.",
            trust_env=True,
        )
        slots = self._slots.setdefault(asyncio.get_running_loop(), asyncio.Semaphore(self.concurrency))
        try:
            async with slots:
                return await retried(
                    lambda: client.call("POST", route, sent, self.requests.seconds),
                    retries=self.requests.retries,
                    pause=PAUSE_SECONDS,
                )
        finally:
            await client.close()

    def _check_length(self, route: str, tokens: int, params: SamplingParams) -> None:
        """Refuse a reply that would take long to read, of a server that has no regard to ``max_tokens``."""
        if tokens > LONGER * params.max_tokens:
            raise SamplerError(
                f"asking {self.url}{route}: the reply has some {tokens} tokens, and max_tokens was "
                f"{params.max_tokens}, to which the server has no regard."
            )


class OpenAISampler(_ServedModel):
    """Samples from a server of OpenAI's interface that returns token ids, such as vLLM and SGLang."""

    async def sample(self, prompt_ids: Sequence[int], params: SamplingParams) -> Generation:
        """One reply to one prompt; SamplerError without its token ids and log-probabilities."""
        body = {
            "prompt": list(prompt_ids),
            "logprobs": 0,  # of the sampled token alone
            "return_token_ids": True,
            "stop_token_ids": list(params.stop_ids),
            "stop": list(params.stop_strings),
            "skip_special_tokens": False,
            "seed": params.seed,
            **WHOLE,
        }
        choice = await self._choice("/completions", body, max_tokens=params.max_tokens, temperature=params.temperature)
        try:
            self._check_length("/completions", len(choice["token_ids"]), params)
            return Generation(
                token_ids=tuple(map(int, choice["token_ids"])),
                logprobs=tuple(map(read_logprob, choice["logprobs"]["token_logprobs"])),
                finish=FINISH[choice["finish_reason"]],
            )
        except (LookupError, TypeError, ValueError) as error:
            raise SamplerError(
                f"asking {self.url}/completions: the answer has no token_ids with their logprobs.token_logprobs "
                f"({type(error).__name__}: {error}). Wanted a server that knows return_token_ids, such as vLLM from "
                f"0.10.2 on; for any other: sampler.name=openai_chat."
            ) from error


@dataclass(eq=False)
class ChatModel(_ServedModel):
    """A model that is sent messages."""

    async def text(self, body: Json, *, max_tokens: int, temperature: float) -> tuple[str, FinishReason]:
        """The text of a reply, without its thoughts, and whether it was cut off."""
        choice = await self._choice("/chat/completions", body, max_tokens=max_tokens, temperature=temperature)
        try:
            content, finish = choice["message"]["content"] or "", str(choice["finish_reason"] or "stop").lower()
            if not isinstance(content, str):  # parts
                content = "".join(part["text"] for part in content if part["type"] == "text")
        except (LookupError, TypeError) as error:
            raise SamplerError(f"asking {self.url}/chat/completions: the reply is no text: {choice!r:.200}") from error
        if finish not in CHAT_FINISH:
            raise SamplerError(f"asking {self.url}/chat/completions: the server ended the reply by {finish!r:.80}")
        return content, CHAT_FINISH[finish]


@dataclass(eq=False)
class OpenAIChatSampler(ChatModel):
    """Samples text from any chat model, to evaluate. Tokens are counted by the tokenizer of ``model_path``."""

    _: KW_ONLY
    model_path: str  # folder or Hub id of the run's tokenizer

    def __post_init__(self) -> None:
        super().__post_init__()
        self._tokenizer = load_tokenizer(self.model_path)

    async def sample(self, prompt_ids: Sequence[int], params: SamplingParams) -> Generation:
        """Refuse: the endpoint takes messages."""
        raise SamplerError(f"asking {self.url}: it takes messages, and found token ids alone; see ``reply``")

    async def reply(self, messages: Sequence[Message], params: SamplingParams) -> Generation:
        """One reply, as the ids of its text up to a stop string; SamplerError without a text."""
        shown = [  # results are texts, as calls are
            {"role": "user" if message.role == "tool" else message.role, "content": message.text}
            for message in messages
        ]
        body = {"messages": shown, "seed": params.seed}
        text, finish = await self.text(body, max_tokens=params.max_tokens, temperature=params.temperature)
        stops = "|".join(map(re.escape, params.stop_strings))
        stop = re.search(stops, text) if stops else None
        text = text if stop is None else text[: stop.end()]
        cut_off = finish is FinishReason.LENGTH and stop is None
        self._check_length("/chat/completions", len(text) // CHARACTERS, params)
        encode = partial(self._tokenizer.encode, add_special_tokens=False, split_special_tokens=True)
        ids = await asyncio.to_thread(encode, text) if len(text) > LARGE else encode(text)
        end = () if cut_off else params.stop_ids[:1]
        return Generation(
            token_ids=(*ids, *end), logprobs=(), finish=FinishReason.LENGTH if cut_off else FinishReason.STOP
        )
