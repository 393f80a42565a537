"""The meter: a line at the end of an observation with the number of its turn, and the used and free tokens.

It is written when the observation is made and never changed, so that later prompts continue by token ids.
"""

from dataclasses import replace

from condensegrpo.core.messages import meter_line
from condensegrpo.episodes.engine import Engine
from condensegrpo.episodes.reaction import Reaction
from condensegrpo.episodes.sampling import Sampled


async def metered(engine: Engine, sampled: Sampled, reaction: Reaction, *, turn: int, draw: float) -> Reaction:
    """A reaction whose last observation ends with the line of the meter, if there is a meter and an observation.

    Used are the tokens of the prompt that would come next, before a condenser rewrites it and without the line itself.

    Args:
        turn: that sampled the reply.
        draw: of the problem, see ``next_prompt``.
    """
    trigger, observations = engine.trigger, reaction.observations
    if trigger.meter == "none" or not observations or reaction.ending is not None:
        return reaction
    tokens = None
    if trigger.meter == "tokens":
        prompt, output = sampled.prompt, sampled.generation.token_ids
        added = engine.renderer.continuation(prompt.context, reaction.reply, observations, output)
        used = len(prompt.ids) + len(output) + len(added)
        tokens = used, trigger.room(engine.limits.max_context_tokens, draw)
    *before, last = observations
    return replace(reaction, observations=(*before, last.followed_by(meter_line(turn, tokens))))
