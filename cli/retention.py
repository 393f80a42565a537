"""``condensegrpo bench retention``: which answers still stand in what condensers keep of a conversation."""

import json
import re
from dataclasses import asdict
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from condensegrpo.cli.compare import parsed_condensers
from condensegrpo.core.errors import ConfigError
from condensegrpo.display import theme
from condensegrpo.display.tables import show_folding, table
from condensegrpo.storage.files import make_folder, write_atomically

if TYPE_CHECKING:
    from collections.abc import Sequence

    from condensegrpo.evaluation.retention import Retention

CONDENSERS = "full, truncate, last_k keep_last=8, observation_mask keep=1000, random_drop, anchors, anchors share=0.5"

SHARE = re.compile(r"\d+/[1-9]\d*|\d*\.?\d+")


def retention(
    data: Annotated[
        Path | None,
        typer.Option(
            metavar="PLACE", help="A wheel of bfcl-eval, or the folder of its data; by default the installed package."
        ),
    ] = None,
    condensers: Annotated[
        str, typer.Option(help="With options, separated by commas; the controls are always measured.")
    ] = CONDENSERS,
    scenarios: Annotated[
        str | None, typer.Option(help="Only these, such as notetaker,healthcare: a model reads them in less time.")
    ] = None,
    budgets: Annotated[str, typer.Option(help="Shares of a conversation that may be kept.")] = "1/2,1/4,1/8,1/16",
    model: Annotated[
        str | None, typer.Option(metavar="FOLDER", help="Count tokens of this model (folder or Hub id) and not words.")
    ] = None,
    match: Annotated[
        Literal["words", "substring"], typer.Option(help="An answer stands as whole words, or also inside a word.")
    ] = "words",
    out: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Also write retention.json and retention.md there.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")] = False,
) -> None:
    """Measure which answers still stand in what condensers keep of a conversation: BFCL v4's 155 memory questions.

    No policy is needed. Controls: the newest messages first, messages in random order, and BM25 with the question.

    Example: condensegrpo bench retention --data bfcl_eval-2026.3.23-py3-none-any.whl

    Example: condensegrpo bench retention --condensers "truncate, attention scorer=path/to/model" --model path/to/model
    """
    from condensegrpo.display.console import loading
    from condensegrpo.storage.bfcl_memory import read_memory_questions

    named, shares = parsed_condensers(condensers), parsed_shares(budgets)
    questions = read_memory_questions(data)
    if scenarios is not None:
        questions = questions.of(scenarios.replace(" ", "").split(","))
    if out is not None:
        make_folder(out)
    with loading("the condensers", quiet=as_json) as display:
        from condensegrpo.evaluation.retention import methods, token_count, words
        from condensegrpo.evaluation.retention import retention as measured

        entrants, count = methods(named), words if model is None else token_count(model)
        display.phase("measuring", len(entrants) * len(shares))
        figures = measured(questions, entrants, shares, count=count, match=match, advance=display.advance)
    report = {
        "questions": len(questions.questions),
        "messages": sum(map(len, questions.messages.values())),
        "budget": "words" if model is None else f"tokens of {model}",
        "match": match,
        "figures": [{**asdict(figure), "budget": str(figure.budget)} for figure in figures],
    }
    _show(report, figures, out, as_json=as_json)


def _show(report: dict[str, object], figures: "Sequence[Retention]", out: Path | None, *, as_json: bool) -> None:
    """Write the files into ``out``, and print a table or the JSON."""
    headings, rows = table_rows(figures)
    title = (
        f"share of answers that stand in what is kept [95 %]\n"
        f"{report['questions']} questions about {report['messages']} messages, budgets in {report['budget']}\n"
        f"second line: less the newest first, paired by question"
    )
    text = json.dumps(report, indent=2)
    if out is not None:
        write_atomically(out / "retention.json", f"{text}\n")
        lines = (headings, ["---"] * len(headings), *rows)
        body = "\n".join(f"| {' | '.join(cell.replace(chr(10), '<br>') for cell in line)} |" for line in lines)
        write_atomically(out / "retention.md", f"{title}\n\n{body}\n")
    if as_json:
        typer.echo(text)
        return
    show_folding(theme.console(), table(title, headings, rows, left=2, lines=True))


def parsed_shares(text: str) -> list[Fraction]:
    """Parse ``--budgets``, such as ``1/2,0.1``.

    Raises:
        ConfigError: the text has another form, or a share is not above 0 and at most 1.
    """
    shares = [Fraction(word) for word in text.replace(" ", "").split(",") if SHARE.fullmatch(word)]
    if len(shares) != text.count(",") + 1 or not all(0 < share <= 1 for share in shares):
        raise ConfigError(f"reading --budgets {text!r}: wanted shares above 0 and at most 1, such as 1/4,0.1.")
    return shares


def table_rows(figures: "Sequence[Retention]") -> tuple[list[str], list[list[str]]]:
    """Headings, and a row for each method: per budget what is retained, and the difference to the baseline below."""
    names = list(dict.fromkeys(figure.name for figure in figures))
    budgets = list(dict.fromkeys(figure.budget for figure in figures))
    cells = {(figure.name, figure.budget): figure for figure in figures}
    sees = {figure.name: "yes" if figure.sees_question else "no" for figure in figures}
    rows = [[name, sees[name], *(_cell(cells[name, budget]) for budget in budgets)] for name in names]
    return ["condenser", "sees the question", *map(str, budgets)], rows


def _cell(figure: "Retention") -> str:
    return f"{figure.retained:.2f}" if figure.difference is None else f"{figure.retained:.2f}\n{figure.difference:+.2f}"
