"""Rewards of single turns: their tool calls, the results of those, and what a turn adds to what the context knows."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from annotated_types import Ge, Gt

from condensegrpo.condensers.decisions import decisions
from condensegrpo.condensers.fold import BRANCH, folded_branches
from condensegrpo.core.messages import Message, Unit, bare
from condensegrpo.core.protocols.reward import TurnReward
from condensegrpo.core.protocols.task import Problem
from condensegrpo.core.trajectory import Trajectory, Turn
from condensegrpo.rewards.matches import aliases_in_lower_case

_FAULT = re.compile(r"Error:|Traceback|timed out|did not finish within|the code was ended")


class ToolExecution(TurnReward):
    """(tool calls of this turn that worked) / (tool calls of the whole trajectory): a turn reward.

    Summed over the turns that is successes/attempts, what the reward ``tool_calls`` pays the outcome. All 0 where no
    tool was called.

        calls 2, 0, 2; worked 1, 0, 2   ─▶   0.25, 0, 0.5
    """

    def turn_rewards(self, trajectory: Trajectory, problem: Problem) -> tuple[float, ...]:
        """One number a turn."""
        attempts = sum(turn.tool_attempts for turn in trajectory.turns)
        successes_K = (turn.tool_successes for turn in trajectory.turns)
        return tuple(successes / attempts if attempts else 0.0 for successes in successes_K)


@dataclass(kw_only=True, eq=False)
class CodeExecution(TurnReward):
    """share·(good calls of this turn)/(valid calls of the trajectory) + each·(good calls of this turn): a turn reward.

    A call is valid if it could be read, and good if its result is not blank and holds none of ``Error:``, ``Traceback``
    or a time-out. Summed over the turns that is share·good/valid + each·good; all 0 without a valid call.

        valid 1, 0, 1; good 1, 0, 0; share 0.3, each 0.05   ─▶   0.2, 0, 0
    """

    share: Annotated[float, Ge(0)] = 0.3
    each: Annotated[float, Ge(0)] = 0.05

    def turn_rewards(self, trajectory: Trajectory, problem: Problem) -> tuple[float, ...]:
        """One number a turn."""
        valid = sum(map(valid_calls, trajectory.turns))
        good_K = map(good_calls, trajectory.turns)
        return tuple(self.share * good / valid + self.each * good if valid else 0.0 for good in good_K)


class AnswerInResults(TurnReward):
    """1 for the turn with the first tool result if it contains any alias of the answer, case ignored: a turn reward.

    results "Error: …" in turn 0, "… Paris …" in turn 2; answer Paris   ─▶   0, 0, 0
    """

    def turn_rewards(self, trajectory: Trajectory, problem: Problem) -> tuple[float, ...]:
        """One number a turn."""
        aliases = aliases_in_lower_case(problem)
        paid_K = [0.0] * len(trajectory.turns)
        for at, turn in enumerate(trajectory.turns):
            results = results_of(turn)
            if results:
                paid_K[at] = float(any(alias in results[0].lower() for alias in aliases))
                break
        return tuple(paid_K)

    def check_problem(self, problem: Problem) -> None:
        """Raise ValueError for a problem without ground truth."""
        aliases_in_lower_case(problem)


@dataclass(kw_only=True, eq=False)
class AnswerInformation(TurnReward):
    """The gain of information about the ground truth from a turn's context to the next one's, bounded.

        r_t = min(max(I_(t+1) − I_t, −bound), bound),   I_t = log π(ground truth | c_t) in nats

    The last turn has no context after it and gets 0. A turn whose context was not measured (one that writes a summary)
    lies between two measured turns: it precedes the next context, so it gets the gain. Unbounded gains add up to
    I of the last context less I of the first, whatever happened between.

        I −9.0 −4.0 −4.5  ─▶  5.0 −0.5 0
    """

    bound: Annotated[float, Gt(0)] = 10.0

    def turn_rewards(self, trajectory: Trajectory, problem: Problem) -> Sequence[float]:
        """One number a turn."""
        measured = [turn.answer_logprob for turn in trajectory.turns]
        if measured and all(value is None for value in measured):
            raise ValueError(
                f"no turn says what its context knows of the answer: set rollout.answer_form, such as "
                f"'<answer>{{answer}}</answer>'; the ground truth is {problem.answer!r}"
            )
        paid, last = [0.0] * len(measured), None
        for turn, value in enumerate(measured):
            if value is not None and last is not None:
                paid[turn - 1] = min(max(value - last, -self.bound), self.bound)
            last = last if value is None else value
        return paid


class FailedCalls(TurnReward):
    """−1 for every turn with a tool call that failed, else 0: a turn reward.

    One of the process rewards of FoldGRPO (https://arxiv.org/abs/2510.11967). A call failed if it could not be read, or
    if its result is blank or an error.

        calls 2, 0, 1; worked 1, 0, 1   ─▶   −1, 0, 0
    """

    def turn_rewards(self, trajectory: Trajectory, problem: Problem) -> tuple[float, ...]:
        """One number a turn."""
        return tuple(-float(turn.tool_successes < turn.tool_attempts) for turn in trajectory.turns)


@dataclass(kw_only=True, eq=False)
class MainLine(TurnReward):
    """−1 for every turn of the main line whose context and reply exceed share·budget tokens, else 0: a turn reward.

    One of the process rewards of FoldGRPO (https://arxiv.org/abs/2510.11967), for the condenser ``fold``: heavy work
    belongs into branches. Turns inside a branch, its return included, turns that open one and turns that write for a
    condenser get 0. The paper penalises the whole main line once it is too long; this, the turns from there on.

    budget 1000, share 0.5; branch in turn 2, return in turn 4
    tokens 300 520 560 700 720 610   ─▶   0, −1, 0, 0, 0, −1
    """

    budget: Annotated[int, Ge(1)]
    share: Annotated[float, Gt(0)] = 0.5

    def turn_rewards(self, trajectory: Trajectory, problem: Problem) -> tuple[float, ...]:
        """One number a turn."""
        last = len(trajectory.turns)
        exempt = {
            turn
            for branch in folded_branches(units_of(trajectory))
            for turn in range(branch.opened, last if branch.closed is None else branch.closed + 1)
        }
        acts = ((index, turn) for index, turn in enumerate(trajectory.turns) if turn.kind == "act")
        long = {index for index, turn in acts if len(turn.prompt_ids) + len(turn.output_ids) > self.share * self.budget}
        return tuple(-float(index in long - exempt) for index in range(last))


@dataclass(kw_only=True, eq=False)
class OffBranch(TurnReward):
    """−1 for every turn of a branch whose calls have no word of the branch's description, else 0: a turn reward.

    One of the process rewards of FoldGRPO (https://arxiv.org/abs/2510.11967), for the condenser ``fold``: a branch
    keeps to its task. There a model judges a whole branch; this compares words of at least ``letters`` letters, case
    ignored, so that it needs none and says less. Turns without a call, and the return, get 0.

    branch("birthplace of Mia"); calls "Mia born", "Ben born"   ─▶   0, 0, −1
    """

    letters: Annotated[int, Ge(1)] = 3

    def turn_rewards(self, trajectory: Trajectory, problem: Problem) -> tuple[float, ...]:
        """One number a turn."""
        units, off = units_of(trajectory), set[int]()
        descriptions: dict[int, str] = {}  # by turn; of two calls in one reply the first opens the branch
        for made in decisions(units, BRANCH):
            descriptions.setdefault(made.turn, str(made.arguments.get("description")))
        for branch in folded_branches(units):
            task = self._words(descriptions[branch.opened])
            end = len(trajectory.turns) if branch.closed is None else branch.closed
            for unit in units:
                calls = " ".join(call.arguments for call in unit.reply.tool_calls)
                if branch.opened < unit.turn < end and calls and not task & self._words(calls):
                    off.add(unit.turn)
        return tuple(-1.0 if turn in off else 0.0 for turn in range(len(trajectory.turns)))

    def _words(self, text: str) -> set[str]:
        return set(re.findall(rf"\w{{{self.letters},}}", text.casefold()))


def units_of(trajectory: Trajectory) -> tuple[Unit, ...]:
    """The units of an episode: every act turn with what answered it."""
    acts = ((index, turn) for index, turn in enumerate(trajectory.turns) if turn.kind == "act")
    return tuple(Unit(turn=index, reply=turn.reply, results=turn.observations) for index, turn in acts)


def results_of(turn: Turn) -> tuple[str, ...]:
    """The texts of a turn's tool results in order, errors and what answered malformed calls included, without tags."""
    return tuple(map(bare, _answers_to_calls(turn)))


def valid_calls(turn: Turn) -> int:
    """Calls of a turn that could be read and were answered."""
    return sum(message.name is not None for message in _answers_to_calls(turn))


def good_calls(turn: Turn) -> int:
    """Valid calls of a turn whose result is not blank and has no ``Error:``, ``Traceback`` or time-out.

    A picture is not blank.

    "24"  ─▶  1      ""  ─▶  0      "Error: python: …"  ─▶  0      "no exception"  ─▶  1
    """
    results = ((bare(message), message.media) for message in _answers_to_calls(turn) if message.name is not None)
    return sum(bool(text.strip() or media) and not _FAULT.search(text) for text, media in results)


def _answers_to_calls(turn: Turn) -> tuple[Message, ...]:
    return tuple(message for message in turn.observations if message.tool_call_id is not None)
