"""One reply of the policy, sampled within the limits of the engine; failures of the sampler end the episode."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf
from operator import index

from condensegrpo.core.errors import SamplerError
from condensegrpo.core.messages import Message, Unit
from condensegrpo.core.protocols.condenser import Request
from condensegrpo.core.protocols.sampler import RepliesToMessages, Sampler
from condensegrpo.core.protocols.task import Expert
from condensegrpo.core.trajectory import Condensation, FinishReason, Generation, SamplingParams, StopReason, Turn
from condensegrpo.episodes.boundary import Boundary, EndEpisode
from condensegrpo.episodes.engine import Engine
from condensegrpo.episodes.parsing import ParsedReply
from condensegrpo.episodes.render import Renderer

ROUNDING = 1e-3  # nats: a log-probability of 0 that was computed in few bits may be above it


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """What the policy is shown."""

    ids: Sequence[int]  # (P,)
    context: Sequence[Message]  # what ids render: the pinned messages and the messages of the units
    units: Sequence[Unit] = ()  # shown after the pinned messages; a condenser may have rewritten them
    condensation: Condensation | None = None  # None: ids continue the last prompt and output
    request: Request | None = None  # of a condenser, with whose instruction the context ends; None: a reply is due
    media: tuple[str, ...] = ()  # the hashes of the pictures in the context, in order


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampled:
    """A prompt and the reply of the policy, as tokens and as text."""

    prompt: Prompt
    generation: Generation
    text: str  # the whole
    read: ParsedReply  # the text without thoughts, and what it calls
    version: int  # of the policy at the request
    frozen: bool = False  # by the engine's writer
    picture_starts: tuple[int, ...] = ()  # where the pictures begin in the prompt's ids
    picture_tokens: int = 0  # of the prompt's ids, those that stand for pictures

    def turn(self) -> Turn:
        """The turn of the prompt and the reply; ``dataclasses.replace`` adds what followed."""
        return Turn(
            prompt_ids=self.prompt.ids,
            output_ids=self.generation.token_ids,
            logprobs=self.generation.logprobs,
            policy_version=self.version,
            frozen=self.frozen,
            condensation=self.prompt.condensation,
            context=self.prompt.context,
            reply=self.read.message,
            media=self.prompt.media,
            picture_starts=self.picture_starts,
            picture_tokens=self.picture_tokens,
        )


async def sample(
    engine: Engine,
    prompt: Prompt,
    *,
    trajectory: str,
    seed: int,
    max_tokens: int,
    stop_strings: tuple[str, ...],
) -> Sampled:
    """Sample one reply.

    Args:
        trajectory: name of the trajectory that the reply belongs to, see ``SamplingParams``.
        seed: of the reply's random stream.
        stop_strings: end the reply, in addition to the stop ids of the renderer.
    """
    params = SamplingParams(
        max_tokens=max_tokens,
        temperature=engine.temperature,
        seed=seed,
        stop_ids=engine.renderer.stop_ids,
        stop_strings=stop_strings,
        trajectory=trajectory,
        media=prompt.media,
    )
    who, seconds = "the sampler" if engine.expert is None else "the expert", engine.limits.turn_seconds
    async with Boundary(who, stop=StopReason.SAMPLER_ERROR, seconds=seconds, plugin=engine.expert):
        sampled = await _sampled(engine, prompt, params)
    if sampled.generation.finish is FinishReason.ABORT:
        raise EndEpisode(StopReason.ABORTED, "the sampler aborted the reply")
    pictures = engine.renderer.pictures
    if pictures is not None and pictures.placeholder_id in sampled.generation.token_ids:
        # later prompts would hold a placeholder without a picture, which no sampler or learner could place
        raise EndEpisode(StopReason.FORMAT, f"the policy sampled {pictures.placeholder}, the placeholder of a picture")
    return sampled


async def generated(sampler: Sampler, prompt_ids: Sequence[int], params: SamplingParams) -> Generation:
    """The reply of a sampler, with plain numbers."""
    return _checked(await sampler.sample(prompt_ids, params), "sample()", params)


def _checked(value: object, call: str, params: SamplingParams) -> Generation:
    if not isinstance(value, Generation):
        raise TypeError(f"{call} returned {value!r:.80}, wanted a Generation")
    try:
        ids, logprobs = tuple(map(index, value.token_ids)), tuple(map(float, value.logprobs))
        finish = FinishReason(value.finish)
    except (TypeError, ValueError) as error:  # of numpy and torch too: they end in files and in messages to workers
        raise TypeError(f"{call} returned {value!r:.200}: {error}") from error
    if logprobs and len(ids) > params.max_tokens:  # a text has other tokens where it was sampled
        raise ValueError(f"{call} returned {len(ids)} tokens, wanted at most max_tokens={params.max_tokens}")
    if negative := [each for each in ids if each < 0]:
        raise ValueError(f"{call} returned the token id {negative[0]}, wanted ids of the tokenizer")
    if wrong := [each for each in logprobs if not -inf < each <= ROUNDING]:
        raise ValueError(
            f"{call} returned the log-probability {wrong[0]} of a token, wanted a finite number of at most 0"
        )
    return Generation(token_ids=ids, logprobs=tuple(min(each, 0.0) for each in logprobs), finish=finish)


async def _sampled(engine: Engine, prompt: Prompt, params: SamplingParams) -> Sampled:
    writer = engine.writer if prompt.request is not None else None
    sampler = writer or engine.sampler
    version = sampler.version
    if engine.expert is not None:
        generation = _written(engine.expert, engine.renderer, prompt, params.max_tokens)
    elif isinstance(sampler, RepliesToMessages):
        if engine.toolbox.template_schemas:
            raise SamplerError(
                "sampling from messages: the chat template is to show the tools, and the messages do not. Set "
                "rollout.tools.format=tagged, which explains them in the system message."
            )
        generation = _checked(await sampler.reply(prompt.context, params), "reply()", params)
    else:
        generation = await _beyond_thoughts(engine.renderer, sampler, prompt, params)
    text = engine.renderer.text(generation.token_ids)
    pictures = engine.renderer.pictures
    ids = tuple(prompt.ids) if prompt.media else ()
    return Sampled(
        prompt=prompt,
        generation=generation,
        text=text,
        read=engine.renderer.parse(generation.token_ids, prompt.ids),
        version=version,
        frozen=writer is not None,
        picture_starts=tuple(span.start for span in engine.renderer.picture_spans(ids, prompt.media)),
        picture_tokens=0 if pictures is None else ids.count(pictures.placeholder_id),
    )


async def _beyond_thoughts(renderer: Renderer, sampler: Sampler, prompt: Prompt, params: SamplingParams) -> Generation:
    """The reply of a sampler, sampled on where a stop string ended it within a thought: there it is quoted."""
    made = await generated(sampler, prompt.ids, params)
    while (
        params.stop_strings
        and made.finish is FinishReason.STOP
        and 0 < len(made.token_ids) < params.max_tokens
        and made.token_ids[-1] not in params.stop_ids
        and renderer.parse(made.token_ids, prompt.ids).thinking
    ):
        further = replace(params, max_tokens=params.max_tokens - len(made.token_ids), seed=params.seed + 1)
        more = await generated(sampler, (*prompt.ids, *made.token_ids), further)
        if not more.token_ids:
            break
        made = Generation(
            token_ids=(*made.token_ids, *more.token_ids),
            logprobs=(*made.logprobs, *more.logprobs),
            finish=more.finish,
        )
        params = replace(params, seed=further.seed)
    return made


def _written(expert: Expert, renderer: Renderer, prompt: Prompt, max_tokens: int) -> Generation:
    """What an expert writes, in the tokens that the policy would write it in; aborted where it gives up.

    A reply that is too long is cut off, as the policy's would be.
    """
    text = expert.reply(prompt.context) if prompt.request is None else expert.write(prompt.request)
    if text is None:
        return Generation(token_ids=(), logprobs=(), finish=FinishReason.ABORT)
    if renderer.has_unknown and (unknown := renderer.unknown(text)[1]):
        raise SamplerError(
            f"writing {text!r:.60}: the tokenizer does not know {', '.join(map(repr, unknown[:8]))}. Add them to "
            f"corpus() of the task, or use another tokenizer"
        )
    ids = renderer.reply_ids(text, prompt.ids)
    if len(ids) > max_tokens and prompt.request is None:
        return Generation(token_ids=ids[:max_tokens], logprobs=(0.0,) * max_tokens, finish=FinishReason.LENGTH)
    if len(ids) > max_tokens:
        raise SamplerError(
            f"writing {text!r:.60}: it has {len(ids)} tokens, and it may have {max_tokens}. Raise "
            f"rollout.limits.max_output_tokens, and max_tokens of the condenser"
        )
    return Generation(token_ids=ids, logprobs=(0.0,) * len(ids), finish=FinishReason.STOP)
