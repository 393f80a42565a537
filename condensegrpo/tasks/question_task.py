"""What the tasks of questions with answers share: two splits without a common question, and the environment."""

from collections.abc import Sequence

from condensegrpo.core.protocols import Problem, Split
from condensegrpo.tasks.answer_environment import AnswerEnvironment, follow_ups_of
from condensegrpo.tasks.answers import AnswerStyle
from condensegrpo.tasks.splits import Splits


class QuestionTask:
    """Questions of two splits, each asked by an ``AnswerEnvironment``. Subclasses read the splits."""

    system: str | None
    answer_style: AnswerStyle
    reminder: str = ""
    _splits: Splits

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
            system=self.system or "",
            answer_style=self.answer_style,
            follow_ups=follow_ups_of(problem),
            reminder=self.reminder,
        )
