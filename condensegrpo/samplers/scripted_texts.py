"""The sampler ``scripted``: replies are texts of a list, a file or a person. Needs a tokenizer and no model."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import yaml
from pydantic import TypeAdapter, ValidationError

from condensegrpo.core.errors import ConfigError, SamplerError
from condensegrpo.core.trajectory import Generation, SamplingParams
from condensegrpo.learner.model_folder import load_tokenizer
from condensegrpo.samplers.scripted import ScriptedSampler

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

CERTAIN = 0.0  # log-probability of a text that nothing sampled
Replies = list[str] | dict[str, list[str]]  # of every problem, or by a text that the problem's prompts contain


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplyRequest:
    """A reply that is needed."""

    prompt: str  # with special tokens
    tokens: int  # of the prompt
    max_tokens: int  # of the reply
    number: int  # of the reply in its trajectory, counted from 0


class TextSampler(ScriptedSampler):
    """Replies with the texts that a function returns, each ended by a stop token as a model would."""

    def __init__(self, tokenizer: "PreTrainedTokenizerBase", say: Callable[[ReplyRequest], str]) -> None:
        """``say`` returns the text of a reply; its errors are not caught."""
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
        reply = self._tokenizer.encode(self._say(request), add_special_tokens=False)
        eos = self._tokenizer.eos_token_id
        end = [eos] if eos in params.stop_ids else params.stop_ids[:1]
        said = ScriptedSampler([[*reply, *end]], logprob=CERTAIN)
        return await said.sample(prompt_ids, params)


def scripted(replies: Replies | None = None, *, file: str | None = None, model_path: str) -> TextSampler:
    """The sampler ``scripted``.

        replies: ["<note> 3 </note>", "<answer> 3 </answer>"]      the first and second reply of every trajectory
        replies: {"start 1": [...], "start 6": [...]}              of trajectories whose prompts contain that text

    Args:
        replies: texts in the order of the turns; condense turns count.
        file: a YAML file of them, in place of ``replies``.
        model_path: folder or Hub id of the tokenizer.
    """
    if (replies is None) == (file is None):
        raise ConfigError("setting up the sampler scripted: wanted one of the options replies and file.")
    script = read_replies(Path(file)) if file is not None else replies
    assert script is not None
    return TextSampler(load_tokenizer(model_path), said(script))


def read_replies(file: Path) -> Replies:
    """The replies of a YAML file."""
    try:
        return TypeAdapter[Replies](Replies).validate_python(yaml.safe_load(file.read_text(encoding="utf-8")))
    except (OSError, ValueError, yaml.YAMLError) as error:
        found = "it holds something else" if isinstance(error, ValidationError) else str(error)
        raise ConfigError(
            f"reading the replies of {file}: {found}. Wanted a YAML file with a list of texts, or with a list for each "
            f"problem under a text of its prompt, such as the question."
        ) from error


def said(script: Replies) -> Callable[[ReplyRequest], str]:
    """A function that speaks a script; of several texts in a prompt the longest counts, and white space does not.

    The function raises SamplerError where the script has no further reply.
    """

    def say(request: ReplyRequest) -> str:
        texts = _of_problem(script, request.prompt) if isinstance(script, Mapping) else script
        if request.number >= len(texts):
            raise SamplerError(
                f"saying reply {request.number} of a trajectory, counted from 0: the script has {len(texts)} for it. "
                f"Add one to the script, or lower rollout.limits.max_turns."
            )
        return texts[request.number]

    return say


def _of_problem(script: Mapping[str, Sequence[str]], prompt: str) -> Sequence[str]:
    shown = "".join(prompt.split())
    keys = [key for key in script if "".join(key.split()) in shown]
    if not keys:
        raise SamplerError(
            f"looking for the replies to a prompt: it contains none of {', '.join(map(repr, script))[:200]}, and ends "
            f"with {prompt[-200:]!r}. Add its question to the script."
        )
    return script[max(keys, key=len)]
