"""Ending early: before a turn the policy drafts its answer, and if it is sure of it the draft is the answer.

    c_t <answer> ─▶ 7 </answer>     p = Π π(token | c_t, <answer>, tokens before)     p ≥ threshold: answered, with 7
                                                                                     else: the turn as if nothing was

The opening is given, the draft is sampled from a random stream of its own, at the temperature of the rollout. So a
trajectory is the same, token by token, as without drafts, up to where it ends. Neither the ground truth nor the
environment has a say. A draft that is taken is a turn whose tokens are trained like any other's, behind the prompt that
they were sampled from; one that is not taken trains nothing.
"""

import math
from dataclasses import dataclass, replace

from condensegrpo.core.messages import Message
from condensegrpo.core.trajectory import Draft, Finish, Turn
from condensegrpo.rollout.engine import Engine
from condensegrpo.rollout.prompt import Prompt
from condensegrpo.rollout.sampling import Sampled, sample


@dataclass(frozen=True, slots=True, kw_only=True)
class Drafted:
    """A draft of an answer to a prompt, and the turn that it is if it is taken."""

    draft: Draft
    answer: str | None  # if it is taken; None: it is not
    turn: Turn


async def drafted(engine: Engine, prompt: Prompt, *, trajectory: str, seed: int, replies: int) -> Drafted | None:
    """The policy's answer to a prompt, were it to give one now; None if that is not asked for yet.

    Args:
        trajectory: id of the one that it belongs to.
        seed: of the draft's random stream.
        replies: of the episode so far.

    Raises:
        Ended: the sampler failed, took longer than ``turn_seconds`` or gave the draft up.
    """
    asked = engine.confidence
    if asked is None or replies < asked.after_turns:
        return None
    opening = engine.renderer.text_ids(asked.opening)
    sampled = await sample(
        engine,
        (*prompt.ids, *opening),
        trajectory=trajectory,
        seed=seed,
        max_tokens=min(asked.max_tokens, engine.limits.max_output_tokens - len(opening)),
        stop_strings=(asked.closing,) if asked.closing else (),
    )
    answer = answer_of(sampled, asked.closing)
    probability = math.exp(math.fsum(sampled.generation.logprobs))
    return Drafted(
        draft=Draft(text=sampled.text, tokens=len(sampled.generation.token_ids), probability=probability),
        answer=answer if probability >= asked.threshold else None,
        turn=_turn(prompt, opening, asked.opening, sampled),
    )


def answer_of(sampled: Sampled, closing: str) -> str | None:
    """What a draft answers; None if nothing, or if it was cut off before what closes an answer.

    closed by "</answer>":   "7 </answer>"  ─▶  "7"     "7 and"  ─▶  None
    """
    text, found, _ = sampled.text.partition(closing) if closing else (sampled.text, True, "")
    cut_off = sampled.generation.finish is not Finish.STOP
    return text.strip() or None if found and not (cut_off and not closing) else None


def _turn(prompt: Prompt, opening: tuple[int, ...], before: str, sampled: Sampled) -> Turn:
    """The draft as a turn: the opening belongs to the prompt, since nobody sampled it."""
    declared = prompt.condensation
    if declared is not None:
        declared = replace(declared, tokens_after=declared.tokens_after + len(opening))
    return Turn(
        prompt_ids=(*prompt.ids, *opening),
        output_ids=sampled.generation.token_ids,
        logprobs=sampled.generation.logprobs,
        policy_version=sampled.version,
        condensation=declared,
        context=prompt.context,
        reply=Message(role="assistant", content=before + sampled.text),
    )
