"""Ending early: before a turn the policy drafts its answer, and if it is sure of it the draft is the answer.

    c_t <answer> ─▶ 7 </answer>     p = Π π(token | c_t, <answer>, tokens before)     p ≥ threshold: answered, with 7
                                                                                     else: the turn as without a draft

The draft is sampled from a separate random stream, at the temperature of the rollout, so a trajectory is the same,
token by token, as without drafts, up to where it ends. Neither the ground truth nor the environment is consulted. A
draft that is taken is a turn whose tokens are trained as any others; a draft that is not taken is not trained.
"""

import math
from dataclasses import dataclass, replace

from condensegrpo.core.messages import Message
from condensegrpo.core.trajectory import Draft, FinishReason, Turn
from condensegrpo.episodes.conversation import Conversation, SampledReply
from condensegrpo.episodes.sampling import sample
from condensegrpo.episodes.view import View


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftedTurn:
    """A draft of an answer to a prompt."""

    draft: Draft
    answer: str | None  # if the draft is taken; None: it is not
    turn: Turn  # if the draft is taken


async def draft_answer(conversation: Conversation, view: View) -> DraftedTurn | None:
    """The policy's answer to a prompt if it answered now; None if drafts are not configured, or not yet due."""
    engine = conversation.engine
    settings = engine.confidence
    if settings is None:
        return None
    seed = conversation.draft_seed()
    if conversation.replies < settings.after_turns:
        return None
    opening = engine.renderer.text_ids(settings.opening)
    declared = view.condensation
    if declared is not None:
        declared = replace(declared, tokens_after=declared.tokens_after + len(opening))
    # the opening belongs to the prompt: the policy did not sample it
    opened = replace(view, ids=(*view.ids, *opening), condensation=declared)
    output = await sample(
        conversation,
        opened,
        seed=seed,
        max_tokens=min(settings.max_tokens, engine.limits.max_output_tokens - len(opening)),
        stop_strings=(settings.closing,) if settings.closing else (),
    )
    text = engine.renderer.text(output.token_ids)
    probability = math.exp(math.fsum(output.logprobs))
    return DraftedTurn(
        draft=Draft(text=text, tokens=len(output.token_ids), probability=probability),
        answer=answer_of(text, output, settings.closing) if probability >= settings.threshold else None,
        turn=conversation.turn(opened, output, Message(role="assistant", content=settings.opening + text)),
    )


def answer_of(text: str, output: SampledReply, closing: str) -> str | None:
    """The answer in a draft; None if it is blank, or if the draft was cut off before the text that closes an answer.

    closed by "</answer>":   "7 </answer>"  ─▶  "7"     "7 and"  ─▶  None
    """
    said, finished = text, output.finish is FinishReason.STOP
    if closing:
        said, found, _ = text.partition(closing)
        finished = bool(found)
    said = said.strip()
    return said if finished and said else None
