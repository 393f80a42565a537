"""What every episode of a rollout shares."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from condensegrpo.core.protocols import Condenser, RanksUnits, Sampler, UnitScorer
from condensegrpo.rollout.boundary import is_own
from condensegrpo.rollout.information import AnswerProbe
from condensegrpo.rollout.render import Renderer
from condensegrpo.rollout.settings import Confidence, Limits, Trigger
from condensegrpo.rollout.stopwatch import Stopwatch
from condensegrpo.rollout.toolcalls import Toolbox


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """The parts that play an episode. Condensers know how to condense; ``trigger`` says when they are asked."""

    sampler: Sampler
    renderer: Renderer
    condenser: Condenser
    condenser_name: str  # as declared in every Condensation
    scorers: Mapping[str, UnitScorer] = field(default_factory=dict)  # what the condenser may ask, by name
    trigger: Trigger = field(default_factory=Trigger)
    toolbox: Toolbox
    limits: Limits
    temperature: float = 1.0  # 0 is greedy
    probe: AnswerProbe | None = None  # None: what contexts know of the answer is not measured
    confidence: Confidence | None = None  # None: no answer is drafted
    stopwatch: Stopwatch = field(default_factory=Stopwatch)  # of the condenser
    own_sampler: bool = field(init=False)  # it and what it calls is this package's code, see ``boundary.guarded``
    own_condenser: bool = field(init=False)  # likewise, and its scorers
    own_probe: bool = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "own_sampler", is_own(self.sampler))
        object.__setattr__(self, "own_condenser", is_own(self.condenser) and is_own(*self._asked_scorers()))
        object.__setattr__(self, "own_probe", is_own(self.probe))

    def _asked_scorers(self) -> list[UnitScorer]:
        """The scorers that the condenser may ask."""
        names = self.condenser.scorers if isinstance(self.condenser, RanksUnits) else ()
        return [self.scorers[name] for name in names if name in self.scorers]
