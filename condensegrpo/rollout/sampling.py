"""One reply of the policy, sampled within the limits of the engine; failures of the sampler end the episode."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from condensegrpo.core.messages import Message
from condensegrpo.core.trajectory import Finish, Generation, SamplingParams, Stop, Turn
from condensegrpo.rollout.boundary import Ended, guarded
from condensegrpo.rollout.engine import Engine
from condensegrpo.rollout.prompt import Prompt


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampled:
    """A reply of the policy, as tokens and as text."""

    generation: Generation
    text: str
    version: int  # of the policy at the request

    def turn(self, prompt: Prompt) -> Turn:
        """The turn of a prompt and this reply to it; ``dataclasses.replace`` adds what followed."""
        return Turn(
            prompt_ids=prompt.ids,
            output_ids=self.generation.token_ids,
            logprobs=self.generation.logprobs,
            policy_version=self.version,
            condensation=prompt.condensation,
            context=prompt.context,
            reply=Message(role="assistant", content=self.text),
        )


async def sample(
    engine: Engine,
    prompt_ids: Sequence[int],
    *,
    trajectory: str,
    seed: int,
    max_tokens: int,
    stop_strings: tuple[str, ...],
) -> Sampled:
    """Sample one reply.

    Args:
        trajectory: id of the trajectory that the reply belongs to.
        seed: of the reply's random stream.
        stop_strings: end the reply, in addition to the stop ids of the renderer.

    Raises:
        Ended: the sampler failed, took longer than ``turn_seconds`` or aborted the reply.
    """
    params = SamplingParams(
        max_tokens=max_tokens,
        temperature=engine.temperature,
        seed=seed,
        stop_ids=tuple(engine.renderer.stop_ids),
        stop_strings=stop_strings,
        trajectory=trajectory,
    )
    sampled = await guarded(
        partial(_sampled, engine, prompt_ids, params),
        who="the sampler",
        stop=Stop.SAMPLER_ERROR,
        seconds=engine.limits.turn_seconds,
    )
    if sampled.generation.finish is Finish.ABORT:
        raise Ended(Stop.ABORTED, "the sampler aborted the reply")
    return sampled


async def _sampled(engine: Engine, prompt_ids: Sequence[int], params: SamplingParams) -> Sampled:
    version = engine.sampler.version
    generation = await engine.sampler.sample(prompt_ids, params)
    if not isinstance(generation, Generation):
        raise TypeError(f"sample() returned {generation!r:.80}, wanted a Generation")
    return Sampled(generation=generation, text=engine.renderer.text(generation.token_ids), version=version)
