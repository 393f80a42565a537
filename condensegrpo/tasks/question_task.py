"""What the tasks of questions with answers share: two splits without a common question, and the environment."""

from collections.abc import Sequence

from condensegrpo.core.protocols import Problem, Split
from condensegrpo.tasks.answer_environment import AnswerEnvironment, follow_ups_of
from condensegrpo.tasks.answers import AnswerStyle
from condensegrpo.tasks.splits import Splits


class QuestionTask:
    """Questions of two splits, each asked by an ``AnswerEnvironment``."""

    def __init__(self, splits: Splits, *, system: str, answer_style: AnswerStyle, reminder: str = "") -> None:
        self._splits = splits
        self._system = system
        self._answer_style: AnswerStyle = answer_style
        self._reminder = reminder

    @property
    def dropped(self) -> int:
        """Training questions that are left out because the evaluation data has them too."""
        return self._splits.dropped

    def problems(self, split: Split) -> Sequence[Problem]:
        """The problems of a split, in the order of the file."""
        return self._splits.train if split == "train" else self._splits.held_out

    def environment(self, problem: Problem) -> AnswerEnvironment:
        """A fresh episode."""
        return AnswerEnvironment(
            question=problem.question,
            system=self._system,
            answer_style=self._answer_style,
            follow_ups=follow_ups_of(problem),
            reminder=self._reminder,
        )
