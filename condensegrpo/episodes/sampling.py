"""One reply of the policy, sampled within the limits of the engine; failures of the sampler end the episode."""

from collections.abc import Sequence
from dataclasses import replace
from math import inf, isfinite
from operator import index

from condensegrpo.core.condenser import Request
from condensegrpo.core.defaults import overrides
from condensegrpo.core.errors import SamplerError
from condensegrpo.core.protocols.sampler import Sampler
from condensegrpo.core.protocols.task import Expert
from condensegrpo.core.trajectory import FinishReason, Generation, SamplingParams, StopReason
from condensegrpo.episodes.boundary import Boundary, EndEpisode
from condensegrpo.episodes.conversation import Conversation, SampledReply
from condensegrpo.episodes.engine import Engine
from condensegrpo.episodes.render import Renderer
from condensegrpo.episodes.view import View

ROUNDING = 1e-3  # nats: a log-probability of 0 that was computed in few bits may be above it


async def sample(
    conversation: Conversation,
    view: View,
    *,
    seed: int,
    max_tokens: int,
    stop_strings: tuple[str, ...] = (),
    request: Request | None = None,
) -> SampledReply:
    """Sample one reply.

    Args:
        seed: of the reply's random stream.
        stop_strings: end the reply, in addition to the stop ids of the renderer.
        request: of a condenser, with whose instruction the view ends; None: a reply is due.
    """
    engine = conversation.engine
    params = SamplingParams(
        max_tokens=max_tokens,
        temperature=engine.temperature,
        seed=seed,
        stop_ids=engine.renderer.stop_ids,
        stop_strings=stop_strings,
        trajectory=conversation.name,
        media=view.media,
    )
    source, seconds = "the sampler" if engine.expert is None else "the expert", engine.limits.turn_seconds
    async with Boundary(source, stop=StopReason.SAMPLER_ERROR, seconds=seconds, plugin=engine.expert):
        output = await _sampled(engine, view, params, request)
    if output.finish is FinishReason.ABORT:
        raise EndEpisode(StopReason.ABORTED, "the sampler aborted the reply")
    pictures = engine.renderer.pictures
    if pictures is not None and pictures.placeholder_id in output.token_ids:
        # later prompts would hold a placeholder without a picture, which no sampler or learner could place
        raise EndEpisode(StopReason.FORMAT, f"the policy sampled {pictures.placeholder}, the placeholder of a picture")
    return output


async def generated(sampler: Sampler, prompt_ids: Sequence[int], params: SamplingParams) -> Generation:
    """The reply of a sampler, with plain numbers."""
    return _checked_generation(await sampler.sample(prompt_ids, params), "sample()", params)


def _checked_generation(value: object, call: str, params: SamplingParams) -> Generation:
    if not isinstance(value, Generation):
        raise TypeError(f"{call} returned {value!r:.80}, wanted a Generation")
    try:
        ids, logprobs = tuple(map(index, value.token_ids)), tuple(map(float, value.logprobs))
        finish = FinishReason(value.finish)
    except (TypeError, ValueError) as error:  # of numpy and torch too: they end in files and in messages to workers
        raise TypeError(f"{call} returned {value!r:.200}: {error}") from error
    if logprobs and len(ids) > params.max_tokens:  # a text has other tokens where it was sampled
        raise ValueError(f"{call} returned {len(ids)} tokens, wanted at most max_tokens={params.max_tokens}")
    if ids and min(ids) < 0:
        raise ValueError(f"{call} returned the token id {min(ids)}, wanted ids of the tokenizer")
    most = max(logprobs, default=0.0)
    if not isfinite(sum(logprobs)) or most > ROUNDING:  # NaN and infinity are in the sum
        wrong = next((each for each in logprobs if not -inf < each <= ROUNDING), most)
        raise ValueError(f"{call} returned the log-probability {wrong} of a token, wanted a finite number of at most 0")
    if most > 0:
        logprobs = tuple(min(each, 0.0) for each in logprobs)
    return Generation(token_ids=ids, logprobs=logprobs, finish=finish)


async def _sampled(engine: Engine, view: View, params: SamplingParams, request: Request | None) -> SampledReply:
    writer = engine.writer if request is not None else None
    sampler = writer or engine.sampler
    version = sampler.version
    if engine.expert is not None:
        made = _expert_text(engine.expert, engine.renderer, view, request, params.max_tokens)
    elif overrides(sampler, Sampler.reply):
        if engine.toolbox.template_schemas:
            raise SamplerError(
                "sampling from messages: the chat template is to show the tools, and the messages do not. Set "
                "rollout.tools.format=tagged, which explains them in the system message."
            )
        made = _checked_generation(await sampler.reply(view.context, params), "reply()", params)
    else:
        made = await _beyond_thoughts(engine.renderer, sampler, view, params)
    return SampledReply(
        token_ids=made.token_ids,
        logprobs=made.logprobs,
        finish=made.finish,
        reply=engine.renderer.parse(made.token_ids, view.ids),
        version=version,
        frozen=writer is not None,
    )


async def _beyond_thoughts(renderer: Renderer, sampler: Sampler, view: View, params: SamplingParams) -> Generation:
    """The reply of a sampler, sampled on where a stop string ended it within a thought: there it is quoted."""
    made = await generated(sampler, view.ids, params)
    while (
        params.stop_strings
        and made.finish is FinishReason.STOP
        and 0 < len(made.token_ids) < params.max_tokens
        and made.token_ids[-1] not in params.stop_ids
        and renderer.parse(made.token_ids, view.ids).thinking
    ):
        further = replace(params, max_tokens=params.max_tokens - len(made.token_ids), seed=params.seed + 1)
        more = await generated(sampler, (*view.ids, *made.token_ids), further)
        if not more.token_ids:
            break
        made = Generation(
            token_ids=(*made.token_ids, *more.token_ids),
            logprobs=(*made.logprobs, *more.logprobs),
            finish=more.finish,
        )
        params = replace(params, seed=further.seed)
    return made


def _expert_text(
    expert: Expert, renderer: Renderer, view: View, request: Request | None, max_tokens: int
) -> Generation:
    """The text of an expert, in the tokens that the policy would write it in; aborted where the expert gives up.

    A reply that is too long is cut off, as the policy's would be.
    """
    text = expert.reply(view.context) if request is None else expert.write(request)
    if text is None:
        return Generation(token_ids=(), logprobs=(), finish=FinishReason.ABORT)
    if not isinstance(text, str):  # the coroutine of an async def, for one
        raise TypeError(f"{'reply' if request is None else 'write'}() returned {text!r:.80}, wanted a text or None")
    if renderer.has_unknown and (unknown := renderer.unknown(text)[1]):
        raise SamplerError(
            f"writing {text!r:.60}: the tokenizer does not know {', '.join(map(repr, unknown[:8]))}. Add them to "
            f"corpus() of the task, or use another tokenizer"
        )
    ids = renderer.reply_ids(text, view.ids)
    if len(ids) > max_tokens and request is None:
        return Generation(token_ids=ids[:max_tokens], logprobs=(0.0,) * max_tokens, finish=FinishReason.LENGTH)
    if len(ids) > max_tokens:
        raise SamplerError(
            f"writing {text!r:.60}: it has {len(ids)} tokens, and it may have {max_tokens}. Raise "
            f"rollout.limits.max_output_tokens, and max_tokens of the condenser"
        )
    return Generation(token_ids=ids, logprobs=(0.0,) * len(ids), finish=FinishReason.STOP)
