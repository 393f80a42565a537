"""What every episode of a rollout shares."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from condensegrpo.core.protocols import Condenser, Sampler, UnitScorer
from condensegrpo.rollout.budget import Limits
from condensegrpo.rollout.information import AnswerProbe
from condensegrpo.rollout.render import Renderer
from condensegrpo.rollout.stopwatch import Stopwatch
from condensegrpo.rollout.toolcalls import Toolbox

CondenseWhen = Literal["every_turn", "over_budget"]  # over_budget: only once the prompt would exceed its trigger


@dataclass(frozen=True, slots=True, kw_only=True)
class Trigger:
    """When the condenser is asked, and how much it may leave, as shares of ``max_context_tokens``."""

    when: CondenseWhen = "every_turn"
    share: float = 1.0  # in (0, 1], of over_budget: a prompt beyond it is condensed
    to: float | None = None  # in (0, share], what a condensed prompt may take; None: the share of the trigger
    jitter: float = 0.0  # in [0, 1), of over_budget: the largest part that a problem's draw takes off the share

    def at(self, budget: int, draw: float) -> int:
        """The tokens beyond which a prompt is condensed.

            floor(budget · share · (1 − jitter · draw))     1000 · 0.8 · (1 − 0.25 · 0.5) = 700

        Args:
            budget: ``max_context_tokens``.
            draw: in [0, 1), of the problem: siblings share it, so that they condense at the same length.
        """
        return _floor(budget * self.share * (1 - self.jitter * draw))

    def room(self, budget: int, draw: float) -> int:
        """The tokens that a condensed prompt may have: never more than what would be condensed again."""
        at = self.at(budget, draw)
        return at if self.to is None else min(at, _floor(budget * self.to))


@dataclass(frozen=True, slots=True, kw_only=True)
class Confidence:
    """When an episode ends by a draft of its answer, see ``rollout/confidence.py``."""

    threshold: float  # in (0, 1], of the probability of the draft as a whole
    before: str  # what opens an answer
    closing: str  # what closes it, without space around it; "": the end of the reply
    after_turns: int = 1  # replies before the first draft
    max_tokens: int = 32  # of a draft; with what opens an answer no more than a reply may have


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """The parts that play an episode. Condensers know how to condense; ``trigger`` says when they are asked."""

    sampler: Sampler
    renderer: Renderer
    condenser: Condenser
    condenser_name: str  # as declared in every Condensation
    scorers: Mapping[str, UnitScorer] = field(default_factory=dict)  # what the condenser may ask, by name
    trigger: Trigger = Trigger()
    toolbox: Toolbox
    limits: Limits
    temperature: float = 1.0  # 0 is greedy
    probe: AnswerProbe | None = None  # None: what contexts know of the answer is not measured
    confidence: Confidence | None = None  # None: no answer is drafted
    stopwatch: Stopwatch = field(default_factory=Stopwatch)  # of the condenser


def _floor(tokens: float) -> int:
    """At least one token; a product that is a whole number but for rounding is that number."""
    return max(int(tokens + 1e-6), 1)
