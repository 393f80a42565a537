"""Scripted replies: the deterministic fake of a sampler, and the sampler ``scripted``. Needs no torch and no model."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import yaml
from pydantic import TypeAdapter, ValidationError

from condensegrpo.config.yaml_tree import parse_yaml
from condensegrpo.core.errors import ConfigError, SamplerError
from condensegrpo.core.protocols.sampler import NamedTensors, Sampler
from condensegrpo.core.trajectory import FinishReason, Generation, SamplingParams

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

CERTAIN = 0.0  # log-probability of a text that nothing sampled
Agent = Callable[[tuple[int, ...]], Sequence[int]]  # prompt ids → output ids
Replies = list[str] | dict[str, list[str]]  # of every problem, or by a text that the problem's prompts contain


class ScriptedSampler(Sampler):
    """Replies from a list, one after another in the order of the calls, or from a function of the prompt.

        ScriptedSampler([[5, 6, 2], [7, 2]])             # the first call gets 5 6 2, the second 7 2, the third an error
        ScriptedSampler(lambda prompt_ids: [len(prompt_ids), 2])

    As with a real sampler a reply ends with the first stop id in it, which is kept, or is cut off at max_tokens.
    Temperature, seed and stop strings have no effect.
    """

    def __init__(
        self,
        replies: Sequence[Sequence[int]] | Agent,
        *,
        logprob: float = -0.5,
        seconds: float | Callable[[tuple[int, ...]], float] = 0.0,
    ) -> None:
        """Set the script.

        Args:
            replies: token ids of each reply, or a function of the prompt that returns them. Its errors are not caught.
            logprob: of every token, in nats, at most 0.
            seconds: duration of a reply, or a function of the prompt that returns it.
        """
        if logprob > 0:
            raise ValueError(f"a log-probability is at most 0, found logprob={logprob}")
        self._script = replies if callable(replies) else iter(replies)
        self._logprob = logprob
        self._seconds = seconds
        self.version = 0  # of the last update

    async def sample(self, prompt_ids: Sequence[int], params: SamplingParams) -> Generation:
        """The next reply of the script."""
        prompt = tuple(prompt_ids)
        # before the wait: in order
        reply = self._script(prompt) if callable(self._script) else next(self._script, None)
        if reply is None:
            raise SamplerError(
                f"sampling a reply to a prompt of {len(prompt)} tokens: the script has no further reply. Give "
                f"ScriptedSampler one reply per call, or a function."
            )
        await asyncio.sleep(self._seconds(prompt) if callable(self._seconds) else self._seconds)
        return self._ended(tuple(reply), params)

    def update(self, named_tensors: NamedTensors, version: int) -> None:
        """Iterate over all tensors, as a real sampler would, and record the version."""
        for _ in named_tensors:
            pass
        self.version = version

    def _ended(self, reply: tuple[int, ...], params: SamplingParams) -> Generation:
        """A reply up to its first stop id or ``max_tokens``."""
        stop = next((index for index, token in enumerate(reply) if token in params.stop_ids), len(reply))
        output = reply[: min(stop + 1, params.max_tokens)]
        stopped = len(output) < params.max_tokens or stop < min(params.max_tokens, len(reply))
        return Generation(
            token_ids=output,
            logprobs=(self._logprob,) * len(output),
            finish=FinishReason.STOP if stopped else FinishReason.LENGTH,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplyRequest:
    """A reply that is needed."""

    prompt: str  # with special tokens
    tokens: int  # of the prompt
    max_tokens: int  # of the reply
    number: int  # of the reply in its trajectory, counted from 0


class TextSampler(ScriptedSampler):
    """Replies with the texts that a function returns, each ended by a stop token as a model would."""

    def __init__(self, tokenizer: "PreTrainedTokenizerBase", say: Callable[[ReplyRequest], str | None]) -> None:
        """``say`` returns the text of a reply, or None to give the trajectory up; its errors are not caught."""
        super().__init__([], logprob=CERTAIN)
        self._tokenizer, self._say = tokenizer, say
        self._played = dict[str, tuple[int, int]]()  # seed of the first reply and number of replies, by trajectory

    async def sample(self, prompt_ids: Sequence[int], params: SamplingParams) -> Generation:
        """The next reply of the trajectory; what ``say`` raises."""
        first, number = self._played.get(params.trajectory, (params.seed, 0))
        if params.seed == first:  # it begins: evaluations may give the same id again
            number = 0
        self._played[params.trajectory] = (first, number + 1)
        prompt = self._tokenizer.decode(list(prompt_ids))
        request = ReplyRequest(prompt=str(prompt), tokens=len(prompt_ids), max_tokens=params.max_tokens, number=number)
        text = self._say(request)
        if text is None:
            return Generation(token_ids=(), logprobs=(), finish=FinishReason.ABORT)
        reply = self._tokenizer.encode(text, add_special_tokens=False)
        eos = self._tokenizer.eos_token_id
        return self._ended((*reply, *([eos] if eos in params.stop_ids else params.stop_ids[:1])), params)


def scripted(replies: Replies | None = None, *, file: str | None = None, model_path: str) -> TextSampler:
    """Replies with given texts in place of a model, to try a configuration.

        replies: ["<note> 3 </note>", "<answer> 3 </answer>"]      the first and second reply of every trajectory
        replies: {"start 1": [...], "start 6": [...]}              of trajectories whose prompts contain that text

    Args:
        replies: texts in the order of the turns; condense turns count.
        file: a YAML file of them, in place of ``replies``.
        model_path: folder or Hub id of the tokenizer.
    """
    from condensegrpo.learner.model_folder import load_tokenizer  # imports torch

    if file is not None and replies is None:
        replies, file = read_replies(Path(file)), None
    if file is not None or replies is None:
        raise ConfigError("setting up the sampler scripted: wanted one of the options replies and file.")
    return TextSampler(load_tokenizer(model_path), said(replies))


def read_replies(file: Path) -> Replies:
    """The replies of a YAML file."""
    try:
        return TypeAdapter[Replies](Replies).validate_python(parse_yaml(file.read_text(encoding="utf-8")))
    except (OSError, ValueError, yaml.YAMLError) as error:
        found = f"it is not YAML: {error}"
        if isinstance(error, OSError | ValidationError):
            found = str(error.strerror) if isinstance(error, OSError) else "it holds something else"
        raise ConfigError(
            f"reading the replies of {file}: {found}. Wanted a YAML file with a list of texts, or with a list for each "
            f"problem under a text of its prompt, such as the question."
        ) from error


def said(script: Replies) -> Callable[[ReplyRequest], str]:
    """A function that speaks a script; of several texts in a prompt the longest counts, and white space does not.

    The function raises SamplerError where the script has no further reply.
    """

    def say(request: ReplyRequest) -> str:
        texts = script
        if isinstance(texts, Mapping):
            shown = "".join(request.prompt.split())
            keys = [key for key in texts if "".join(key.split()) in shown]
            if not keys:
                raise SamplerError(
                    f"looking for the replies to a prompt: it contains none of {', '.join(map(repr, texts))[:200]}, "
                    f"and ends with {request.prompt[-200:]!r}. Add its question to the script."
                )
            texts = texts[max(keys, key=len)]
        if request.number >= len(texts):
            raise SamplerError(
                f"saying reply {request.number} of a trajectory, counted from 0: the script has {len(texts)} for it. "
                f"Add one to the script, or lower rollout.limits.max_turns."
            )
        return texts[request.number]

    return say
