"""What a loss is: a decorated function of the columns of trained tokens. Torch only.

    @loss(summary="−A·logp of the likely tokens alone", formula="l = −A·logp where logp > floor, else 0")
    def likely(logp_T: Tensor, old_T: Tensor, advantage_T: Tensor, *, floor: float = -5.0) -> TokenLoss:
        ...

The signature declares the rest: with a keyword ``turn_T`` the loss of a token depends on the other tokens of its turn;
all other keywords are options, whose annotations say which values are allowed. A loss sees the tokens of one
micro-batch: what it gives a token must not depend on those of other turns (``condensegrpo.algorithms.invariance``).
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from condensegrpo.algorithms.losses.columns import check_columns, check_turns

COLUMNS = ("logp_T", "old_T", "advantage_T", "turn_T")  # what the trainer supplies


class TokenLoss(NamedTuple):
    """The loss of every trained token, with statistics that carry no gradient; sum them, then divide by the tokens."""

    loss_T: Tensor  # float, not yet weighted
    ratio_T: Tensor  # float, π(token) / π_old(token), or its turn's; what the bounds apply to
    low_T: Tensor  # bool, the lower bound acts: no gradient (``clipped``, ``gspo``), or a raised factor (``cispo``)
    high_T: Tensor  # bool, the upper bound acts: no gradient (``clipped``, ``gspo``), or a lowered factor (``cispo``)


@dataclass(frozen=True, slots=True, kw_only=True)
class LossPlugin:
    """A loss of trained tokens, as ``loss`` declares it."""

    function: Callable[..., TokenLoss]
    summary: str  # one line for tables and --help
    formula: str  # for display

    @property
    def name(self) -> str:
        """That of the function."""
        return self.function.__name__

    @property
    def whole_turns(self) -> bool:
        """Whether the loss of a token depends on the other tokens of its turn."""
        return "turn_T" in inspect.signature(self.function).parameters

    @property
    def options(self) -> tuple[str, ...]:
        """What a configuration may set."""
        return tuple(name for name in inspect.signature(self.function).parameters if name not in COLUMNS)

    def __call__(
        self, logp_T: Tensor, old_T: Tensor, advantage_T: Tensor, *, turn_T: Tensor | None = None, **options: object
    ) -> TokenLoss:
        """The loss of every trained token of a micro-batch; T may be 0.

        Args:
            logp_T: float, nats, under the weights that learn; carries the gradient.
            old_T: float, nats, under the weights it was sampled from; no gradient.
            advantage_T: float, of the token's turn; no gradient.
            turn_T: int, the token's turn: any labels, one for all tokens of a turn and no two turns the same. Losses
                of single tokens do without.
            options: of the loss.

        Raises:
            ValueError: columns of different shapes, turns that are not integers, or that it returned something else.
        """
        doing = f"computing the loss {self.name}"
        check_columns(doing, logp_T=logp_T, old_T=old_T, advantage_T=advantage_T)
        if self.whole_turns:
            if turn_T is None:
                raise ValueError(f"{doing}: it needs turn_T, the turn of every token.")
            check_columns(doing, logp_T=logp_T, turn_T=turn_T)
            check_turns(doing, turn_T)
            options = {"turn_T": turn_T, **options}
        value = self.function(logp_T, old_T, advantage_T, **options)
        shapes = [getattr(column, "shape", None) for column in value] if isinstance(value, TokenLoss) else []
        if not shapes or any(shape != logp_T.shape for shape in shapes):
            found = " ".join(repr(value).split())[:80]
            raise ValueError(f"it returned {found}, wanted a TokenLoss with one entry a token in every column")
        return value


def loss(*, summary: str, formula: str) -> Callable[[Callable[..., TokenLoss]], LossPlugin]:
    """Declares a loss; its name is that of the function.

    Args:
        summary: one line for tables.
        formula: for display; may have several lines.
    """
    return lambda function: LossPlugin(function=function, summary=summary, formula=formula)
