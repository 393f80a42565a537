"""``--tokens``: the sampled tokens of a turn as glosses, coloured by their advantage.

<note>     5  </note>    <end>       text
    11    26       12        1       id
 -0.02 -0.11    -0.00    -0.03       log-probability, nats
"""

from collections.abc import Iterator, Sequence

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from condensegrpo.display import theme
from condensegrpo.display.neutral import one_line
from condensegrpo.inspection.panes import TokenView, TurnView

LONGEST = 24  # characters of one token's text
SURPRISING = -2.0  # nats: less likely than one in seven


class Glosses:
    """Tokens side by side, three lines each, wrapped at the width of the console."""

    def __init__(self, tokens: Sequence[TokenView], style: str) -> None:
        self._tokens = tokens
        self._style = style

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """As many tokens a line as fit."""
        for line in _lines([_columns(token) for token in self._tokens], options.max_width):
            for row in range(3):
                yield Text("  ").join(self._cell(columns, row) for columns in line)
            yield Text()

    def _cell(self, columns: tuple[str, str, str], row: int) -> Text:
        width = max(cell_len(column) for column in columns)
        text = " " * (width - cell_len(columns[row])) + columns[row]
        surprising = row == 2 and float(columns[2]) < SURPRISING
        return Text(text, self._style if row == 0 else theme.WARN if surprising else theme.DIM)


def token_grid(turn: TurnView, scale: float) -> Glosses:
    """The sampled tokens of a turn; ``scale`` is the advantage that gets the full colour."""
    trained = turn.weight is None or turn.weight > 0
    advantage = turn.advantage if turn.advantage is not None and trained else 0.0
    return Glosses(turn.tokens or (), theme.signed_style(advantage, scale, background=True))


def _columns(token: TokenView) -> tuple[str, str, str]:
    text = "" if token.text is None else one_line(token.text, LONGEST).replace(" ", "␣")
    return text, str(token.id), f"{token.logprob:.2f}"


def _lines(glosses: Sequence[tuple[str, str, str]], width: int) -> Iterator[list[tuple[str, str, str]]]:
    line: list[tuple[str, str, str]] = []
    used = 0
    for columns in glosses:
        wide = max(cell_len(column) for column in columns) + 2
        if line and used + wide > width:
            yield line
            line, used = [], 0
        line.append(columns)
        used += wide
    if line:
        yield line
