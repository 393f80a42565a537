"""Retention: the share of questions whose answer still stands in what a condenser keeps of a conversation.

    pip download --no-deps bfcl-eval==2026.3.23
    python benchmarks/retention.py --data bfcl_eval-2026.3.23-py3-none-any.whl [--json]

The data are the 155 memory questions of BFCL v4. `--help` lists the options.

    budget 1/4, 40 words; the answer is "Seattle"
    newest first    … my counter is only 38 square feet.                  0
    BM25            I live in Seattle …                                   1

No policy is needed: it measures what is kept, not whether a model finds it there. Every condenser is called once for
each question and budget, with the question pinned. Beside the condensers there are three controls, which fill the
budget with whole messages: the newest first, in random order, and by BM25 with the question.
"""

import argparse
import asyncio
import json
import random
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from fractions import Fraction
from functools import cache, partial
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Literal, get_args

from tables import show

from condensegrpo.assembly.build import build_condenser
from condensegrpo.assembly.scorers import NEEDED, check_frozen, check_models, frozen_model, frozen_scorer, split_layers
from condensegrpo.cli.evaluate import parsed_condensers
from condensegrpo.config.use import CondenserUse
from condensegrpo.core.condenser import Budget, Condenser, Count, UnitScorer, with_tokens
from condensegrpo.core.errors import ConfigError
from condensegrpo.core.messages import History, Message, Unit, flatten
from condensegrpo.episodes.render import Renderer
from condensegrpo.evaluation.figures import Contender
from condensegrpo.learner.model_folder import end_ids, load_tokenizer, max_positions
from condensegrpo.metrics.intervals import Interval, paired_difference, success_interval
from condensegrpo.rewards.matches import contains_answer
from condensegrpo.studies.tasks.bfcl_memory import MemoryQuestion, MemoryQuestions, read_memory_questions

if TYPE_CHECKING:
    import bm25s

CONDENSERS = "full, truncate, last_k keep_last=8, observation_mask keep=1000, random_drop, anchors, anchors share=0.5"
SHARE = re.compile(r"\d+/[1-9]\d*|\d*\.?\d+")
Match = Literal["words", "substring"]  # of ``contains_answer``
BASELINE = "newest"  # what every other row is compared with
DRAWS = 8  # random orders for each question
Order = Callable[[History], Sequence[int]]  # positions of the units, the first to keep first


@dataclass(frozen=True, slots=True, kw_only=True)
class Retention:
    """One condenser or control under one budget."""

    name: str
    sees_question: bool  # whether what it keeps depends on the question's words
    budget: Fraction  # share of the conversation
    used: float  # mean share of the conversation that it kept
    retained: Interval  # share of the questions whose answer is in what is kept
    difference: Interval | None  # less the baseline, paired by question; None: it is the baseline


@dataclass(frozen=True, slots=True, kw_only=True)
class Method:
    """A condenser or a control."""

    name: str
    condenser: Condenser | None = None  # None: a control
    orders: tuple[Order, ...] = ()  # of a control; several: the mean over them
    sees_question: bool = False


def words(messages: Iterable[Message]) -> int:
    """The words of some messages: a count that needs no tokenizer."""
    return sum(_words(message.text) for message in messages)


@cache
def _words(text: str) -> int:
    return len(text.split())


def history_of(question: MemoryQuestion, messages: Sequence[str]) -> History:
    """The question, pinned, and a unit for every message of the user: an empty reply that the message answers."""
    reply = Message(role="assistant", content="")
    units = (
        Unit(turn=turn, reply=reply, results=(Message(role="user", content=text),))
        for turn, text in enumerate(messages)
    )
    return History(pinned=(Message(role="user", content=question.question),), units=tuple(units))


def methods(condensers: Sequence[tuple[str, Mapping[str, object]]]) -> tuple[Method, ...]:
    """The controls, and condensers by their names and options."""
    controls = (
        Method(name=BASELINE, orders=(_newest,)),
        Method(name="random", orders=tuple(_shuffled(seed) for seed in range(DRAWS))),
        Method(name="bm25", orders=(_by_bm25,), sees_question=True),
    )
    built: list[Method] = []
    for condenser, options in condensers:
        name = Contender(condenser=condenser, options=options, budget=None).label
        plugin = build_condenser(CondenserUse(name=condenser, options=dict(options)))
        if plugin.writes:
            raise ConfigError(
                f"measuring the retention of {name}: it asks a policy for text, and this benchmark has none. "
                f"Measure it with condensegrpo eval --compare."
            )
        if name in (method.name for method in (*controls, *built)):
            raise ConfigError(f"measuring the retention of {name}: it is named twice.")
        built.append(Method(name=name, condenser=plugin, sees_question=bool(plugin.scorers)))
    return (*controls, *built)


def frozen_scorers(names: Sequence[str]) -> dict[str, UnitScorer]:
    """Scorers without a policy: each is a frozen model, which reads as many tokens at once as it has positions."""
    for name in names:
        if split_layers(name)[0] in NEEDED:
            raise ConfigError(
                f"setting up the scorer {name!r} of the condenser: there is no policy here. Name a frozen model: its "
                f"folder or Hub id, such as scorer=path/to/model."
            )
        check_frozen(name, (Message(role="user", content="?"),), 0)
    check_models(names, "")
    model, opened = partial(frozen_model, dtype="float32"), ((name, *split_layers(name)) for name in names)
    return {
        name: _WithinPositions(frozen_scorer(path, layers, model), max_positions(path)) for name, path, layers in opened
    }


@dataclass(frozen=True, slots=True)
class _WithinPositions:
    scorer: UnitScorer
    most: int | None  # tokens that the model can read at once; None: any number

    async def score(self, histories: Sequence[History], tokens: int) -> Sequence[Sequence[float]]:
        return await self.scorer.score(histories, tokens if self.most is None else min(tokens, self.most))


def token_count(model: str) -> Count:
    """Counts tokens with the tokenizer and chat template of a model folder or Hub id."""
    return Renderer(load_tokenizer(model), stop_ids=end_ids(model)).count


def retention(
    data: MemoryQuestions,
    entrants: Sequence[Method],
    budgets: Sequence[Fraction],
    *,
    count: Count = words,
    match: Match = "words",
) -> tuple[Retention, ...]:
    """The figures of every method under every budget, in this order; the baseline is the first method.

    Args:
        count: of messages, in the unit of the budgets.
    """
    scorers = frozen_scorers([name for method in entrants if method.condenser for name in method.condenser.scorers])
    raw = [history_of(question, data.messages[question.scenario]) for question in data.questions]
    histories = [with_tokens(history, count) for history in raw]
    orders = {method.name: [[order(past) for order in method.orders] for past in histories] for method in entrants}
    figures: list[Retention] = []
    for budget in budgets:
        baseline: dict[str, list[float]] = {}
        for method in entrants:
            values, used = {}, []
            for question, history, ordered in zip(data.questions, histories, orders[method.name], strict=True):
                pinned = count(history.pinned)
                total = count(history.messages) - pinned
                room = int(total * budget)
                shown = [_filled(order, history, room) for order in ordered]
                if method.condenser is not None:
                    limit = Budget(tokens=room, prompt_tokens=pinned + room, scorers=scorers)
                    shown = [asyncio.run(method.condenser.condense(history, limit)).units]
                values[question.id] = [float(contains_answer(question.answers, _text(units), match)) for units in shown]
                used += [(count(flatten(history.pinned, units)) - pinned) / total for units in shown]
            baseline = baseline or values
            difference = None if values is baseline else paired_difference(values, baseline)
            retained = success_interval(values)
            figures.append(
                Retention(
                    name=method.name,
                    sees_question=method.sees_question,
                    budget=budget,
                    used=fmean(used),
                    retained=retained,
                    difference=difference,
                )
            )
    return tuple(figures)


def _filled(order: Sequence[int], history: History, room: int) -> Sequence[Unit]:
    """The units in this order that still fit."""
    chosen = []
    for position in order:
        cost = history.units[position].tokens
        if cost <= room:
            chosen.append(position)
            room -= cost
    return [history.units[position] for position in sorted(chosen)]


def _newest(history: History) -> Sequence[int]:
    return range(len(history.units) - 1, -1, -1)


def _shuffled(seed: int) -> Order:
    def order(history: History) -> Sequence[int]:
        positions = list(range(len(history.units)))
        random.Random(f"{seed}/{history.pinned[-1].text}").shuffle(positions)
        return positions

    return order


def _by_bm25(history: History) -> Sequence[int]:
    """The best match of the question first; units that match equally well, the newer first."""
    import bm25s

    question = bm25s.tokenize(history.pinned[-1].text, stopwords="english", return_ids=False, show_progress=False)
    index = _index(tuple(_text((unit,)) for unit in history.units))
    known = [word for word in question[0] if word in index.vocab_dict]
    scores = index.get_scores(known).tolist() if known else [0.0] * len(history.units)
    return sorted(range(len(scores)), key=lambda position: (-scores[position], -position))


@cache
def _index(texts: tuple[str, ...]) -> "bm25s.BM25":
    import bm25s

    index = bm25s.BM25()
    index.index(bm25s.tokenize(texts, stopwords="english", show_progress=False), show_progress=False)
    return index


def _text(units: Iterable[Unit]) -> str:
    return "\n".join(message.text for unit in units for message in unit.messages)


def parsed_shares(text: str) -> list[Fraction]:
    """Parse ``--budgets``, such as ``1/2,0.1``."""
    shares = [Fraction(word) for word in text.replace(" ", "").split(",") if SHARE.fullmatch(word)]
    if len(shares) != text.count(",") + 1 or not all(0 < share <= 1 for share in shares):
        raise ConfigError(f"reading --budgets {text!r}: wanted shares above 0 and at most 1, such as 1/4,0.1.")
    return shares


def table_rows(figures: Sequence[Retention]) -> tuple[list[str], list[list[str]]]:
    """Headings, and a row for each method: per budget the share, in brackets the difference to the baseline."""
    names = list(dict.fromkeys(figure.name for figure in figures))
    budgets = list(dict.fromkeys(figure.budget for figure in figures))
    cells = {(figure.name, figure.budget): figure for figure in figures}
    sees = {figure.name: "yes" if figure.sees_question else "no" for figure in figures}
    rows = [[name, sees[name], *(_cell(cells[name, budget]) for budget in budgets)] for name in names]
    return ["condenser", "sees the question", *map(str, budgets)], rows


def _cell(figure: Retention) -> str:
    if figure.difference is None:
        return f"{figure.retained:.2f}"
    return f"{figure.retained.mean:.2f} ({figure.difference:+.2f})"


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--data", type=Path, help="wheel of bfcl-eval, or the folder of its data; else as installed")
    parser.add_argument("--condensers", default=CONDENSERS, help="with options, separated by commas")
    parser.add_argument("--scenarios", help="only these, such as notetaker,healthcare")
    parser.add_argument("--budgets", default="1/2,1/4,1/8,1/16", help="shares of a conversation that may be kept")
    parser.add_argument("--model", help="count tokens of this model (folder or Hub id) and not words")
    parser.add_argument("--match", choices=get_args(Match), default="words", help="whole words, or inside a word too")
    parser.add_argument("--json", action="store_true", help="print one JSON object; an interval is [mean, low, high]")
    given = parser.parse_args(arguments)
    shares, entrants = parsed_shares(given.budgets), methods(parsed_condensers(given.condensers))
    data = read_memory_questions(given.data)
    if given.scenarios is not None:
        data = data.of(given.scenarios.replace(" ", "").split(","))
    count = words if given.model is None else token_count(given.model)
    figures = retention(data, entrants, shares, count=count, match=given.match)
    budget = "words" if given.model is None else f"tokens of {given.model}"
    questions, messages = len(data.questions), sum(map(len, data.messages.values()))
    if given.json:
        rows = [{**asdict(figure), "budget": str(figure.budget)} for figure in figures]
        report = {"questions": questions, "messages": messages, "budget": budget, "match": given.match, "figures": rows}
        print(json.dumps(report, indent=2))
    else:
        show(f"{questions} questions about {messages} messages, budgets in {budget}", *table_rows(figures))


if __name__ == "__main__":
    main()
