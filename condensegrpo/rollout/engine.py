"""What every episode of a rollout shares."""

from dataclasses import dataclass
from typing import Literal

from condensegrpo.protocols import Condenser, Sampler
from condensegrpo.rollout.budget import Limits
from condensegrpo.rollout.render import Renderer
from condensegrpo.rollout.toolcalls import Toolbox

CondenseWhen = Literal["every_turn", "over_budget"]  # over_budget: only once the prompt would exceed max_context_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """The parts that play an episode. Condensers know how to condense; ``condense_when`` says when they are asked."""

    sampler: Sampler
    renderer: Renderer
    condenser: Condenser
    condenser_name: str  # as declared in every Condensation
    condense_when: CondenseWhen = "every_turn"
    toolbox: Toolbox
    limits: Limits
    temperature: float = 1.0  # 0 is greedy
