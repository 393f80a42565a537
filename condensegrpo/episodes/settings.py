"""Settings of an episode, as the configuration holds them. Standard library and ``annotated_types`` only.

The ranges are annotations: pydantic checks them when a configuration is read.
"""

from dataclasses import dataclass
from itertools import pairwise
from typing import Annotated, Literal

from annotated_types import Ge, Gt, Le, Lt

PLACE = "{answer}"  # where an answer stands in the text that opens and closes it


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The limits of one episode. The limits of tool calls are in ``rollout.tools``."""

    max_turns: Annotated[int, Ge(1)] = 8
    """Replies of one trajectory; every reply counts."""
    max_context_tokens: Annotated[int, Ge(8)] = 2048
    """Largest prompt of a turn, chat template included."""
    max_output_tokens: Annotated[int, Ge(1)] = 512
    """Sampled tokens of one turn."""
    ends_at_cut: bool = True
    """Whether a reply that is cut off at max_output_tokens ends the episode (stop: output_length); false: it is
    used."""
    turn_seconds: Annotated[float, Gt(0)] = 600.0
    """Time limit of one reply (waiting for a batch included), of one environment step and of one condensation."""
    reward_seconds: Annotated[float, Gt(0)] = 300.0
    """Time limit of one call of the reward (stop: reward_error)."""

    @property
    def turn_tokens(self) -> int:
        """Most tokens of a prompt with its reply, and of a row: the last context holds whatever the row began with."""
        return self.max_context_tokens + self.max_output_tokens


@dataclass(frozen=True, kw_only=True)
class ToolLimits:
    """The limits of tool calls, of the run's tools and of an environment's alike."""

    max_turns: Annotated[int, Ge(0)] | None = None
    """Replies of a trajectory whose calls are run; a later call ends it unexecuted (stop: turn_limit). null: all."""
    max_turns_per_query: Annotated[int, Ge(0)] | None = None
    """Likewise of one query, where a task asks several. null: all."""
    seconds: Annotated[float, Gt(0)] = 10.0
    """Time limit of one tool call."""
    max_chars: Annotated[int, Ge(1)] = 4000
    """Characters of a tool's result that the policy reads; of a longer result, its beginning and its end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CondenseSettings:
    """When the condenser is called and how much it may leave, as shares of ``rollout.limits.max_context_tokens``."""

    when: Literal["every_turn", "over_budget"] = "every_turn"
    """Before every turn, or only when a prompt would exceed the threshold: a prefix cache holds until then."""
    threshold: Annotated[float, Gt(0), Le(1)] = 1.0
    """Share of max_context_tokens beyond which over_budget condenses."""
    target: Annotated[float, Gt(0), Le(1)] | None = None
    """Share of max_context_tokens that a condensed prompt may take, at most ``threshold``; null: ``threshold``. A low
    one makes rewrites rare, and each of them breaks a prefix cache."""
    jitter: Annotated[float, Ge(0), Lt(1)] = 0.0
    """Maximum random reduction of ``threshold``, drawn per problem: siblings condense at the same length."""

    writer: str = "policy"
    """Who writes the texts that a condenser asks for: policy, initial (the policy that GRPO starts from; without a
    run the evaluated model), or a run (at each start its newest checkpoint), checkpoint, model folder or Hub id. Only
    texts of policy train; another writer is a second model, sampled by transformers."""
    meter: Literal["none", "turns", "tokens"] = "none"
    """What a line at the end of every observation says: the number of its turn, or also the used and free tokens."""
    schedule: tuple[tuple[Annotated[int, Ge(0)], Annotated[float, Gt(0), Le(1)]], ...] = ()
    """Budget as shares of max_context_tokens by training step, linear between two points; evaluations use the last. []:
    all of it at every step."""

    def __post_init__(self) -> None:
        steps = [step for step, _ in self.schedule]
        if any(step >= later for step, later in pairwise(steps)):
            raise ValueError(f"the steps of schedule are {steps}, wanted each above the last")

    def budget(self, most: int, step: int) -> int:
        """The context budget of a step: with the schedule [[0, 1.0], [100, 0.5]] at step 50 three quarters of ``most``.

        Args:
            most: ``max_context_tokens``.
            step: of training; below 0: of an evaluation.
        """
        return _floor(most * self._share_at(step)) if self.schedule else most

    def _share_at(self, step: int) -> float:
        """The share of the schedule at a step, linear between two of its points; below 0: that of the last."""
        if 0 <= step <= self.schedule[0][0]:
            return self.schedule[0][1]
        for (first, start), (last, end) in pairwise(self.schedule):
            if first < step <= last:
                return start + (end - start) * (step - first) / (last - first)
        return self.schedule[-1][1]

    def least_budget(self, most: int) -> int:
        """The smallest context budget of a run."""
        return _floor(most * min((share for _, share in self.schedule), default=1.0))

    def threshold_tokens(self, budget: int, draw: float) -> int:
        """The tokens beyond which a prompt is condensed.

            floor(budget · threshold · (1 − jitter · draw))     1000 · 0.8 · (1 − 0.25 · 0.5) = 700

        Args:
            budget: ``max_context_tokens``.
            draw: in [0, 1), of the problem: siblings share it, so that they condense at the same length.
        """
        return _floor(budget * self.threshold * (1 - self.jitter * draw))

    def target_tokens(self, budget: int, draw: float) -> int:
        """The tokens that a condensed prompt may have: never more than the trigger allows."""
        at = self.threshold_tokens(budget, draw)
        return at if self.target is None else min(at, _floor(budget * self.target))


@dataclass(frozen=True, slots=True, kw_only=True)
class Workers:
    """Where trajectories are played: in the process of the sampler, or in workers if it is reached by URL."""

    processes: Annotated[int, Ge(0)] = 0
    """Worker processes of each rank, at most one for each group of a batch; 0: none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfidenceSettings:
    """When a draft of the answer ends an episode (stop: confident), see ``episodes/confidence.py``."""

    threshold: Annotated[float, Gt(0), Le(1)] = 0.9
    """Probability of the whole draft, its closing text included, from which on it is the answer."""
    form: str = "<answer>{answer}</answer>"
    """How an answer is written; the text before {answer} is given, the rest is sampled."""
    after_turns: Annotated[int, Ge(0)] = 1
    """Replies before the first draft."""
    max_tokens: Annotated[int, Ge(1)] = 32
    """Sampled tokens of a draft; with the opening text at most the length of a reply."""

    def __post_init__(self) -> None:
        check_form(self.form)

    @property
    def opening(self) -> str:
        """The text that opens an answer."""
        return self.form.partition(PLACE)[0]

    @property
    def closing(self) -> str:
        """The text that closes an answer, without space around it; empty: the end of the reply."""
        return self.form.partition(PLACE)[2].strip()


def check_form(form: str) -> None:
    """Check that ``{answer}`` is in the form of an answer exactly once."""
    if form.count(PLACE) != 1:
        raise ValueError(f"found {form!r}, wanted {PLACE} in it exactly once, as in <answer>{PLACE}</answer>")


def _floor(tokens: float) -> int:
    """At least one token; a product that is a whole number up to rounding errors is that number."""
    return max(int(tokens + 1e-6), 1)
