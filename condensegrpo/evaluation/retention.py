"""Retention: the share of questions whose answer still stands in what a condenser keeps of a conversation.

    budget 1/4, 40 words; the answer is "Seattle"
    newest first    … my counter is only 38 square feet.                  0
    BM25            I live in Seattle …                                   1

No policy is needed: it measures what is kept, not whether a model finds it there. Every condenser is called once for
each question and budget, with the question pinned. Beside the condensers there are three controls, which fill the
budget with whole messages: the newest first, in random order, and by BM25 with the question.
"""

import asyncio
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from statistics import fmean
from typing import TYPE_CHECKING

from condensegrpo.assembly.parts import build_condenser
from condensegrpo.assembly.scorers import frozen_scorers, names_of
from condensegrpo.config.schema import CondenserPlugin
from condensegrpo.core.errors import ConfigError
from condensegrpo.core.messages import History, Message, Unit, flatten
from condensegrpo.core.protocols.condenser import Budget, Condenser, Count, Writes
from condensegrpo.episodes.render import Renderer
from condensegrpo.evaluation.comparison import Contender
from condensegrpo.learner.policy import end_ids, load_tokenizer
from condensegrpo.metrics.estimates import Interval, paired_difference, success_interval
from condensegrpo.storage.bfcl_memory import Match, MemoryQuestion, MemoryQuestions, contains_answer

if TYPE_CHECKING:
    import bm25s

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
    """The controls, and condensers by their names and options.

    Raises:
        ConfigError: a condenser is unknown, refuses its options, is named twice or asks a policy for text.
    """
    controls = (
        Method(name=BASELINE, orders=(_newest,)),
        Method(name="random", orders=tuple(_shuffled(seed) for seed in range(DRAWS))),
        Method(name="bm25", orders=(_by_bm25,), sees_question=True),
    )
    built: list[Method] = []
    for condenser, options in condensers:
        name = Contender(condenser=condenser, options=options, budget=None).label
        plugin = build_condenser(CondenserPlugin(name=condenser, options=dict(options)))
        if isinstance(plugin, Writes) and plugin.writes:
            raise ConfigError(
                f"measuring the retention of {name}: it asks a policy for text, and this benchmark has none. "
                f"Measure it with condensegrpo eval --compare."
            )
        if name in (method.name for method in (*controls, *built)):
            raise ConfigError(f"measuring the retention of {name}: it is named twice.")
        built.append(Method(name=name, condenser=plugin, sees_question=bool(names_of(plugin))))
    return (*controls, *built)


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
    advance: Callable[[], None] = lambda: None,
) -> tuple[Retention, ...]:
    """The figures of every method under every budget, in this order; the baseline is the first method.

    Args:
        count: of messages, in the unit of the budgets.
        advance: called after each method and budget.

    Raises:
        ConfigError: a condenser ranks by the attention of a policy, or of a model that cannot be read.
    """
    scorers = frozen_scorers([name for method in entrants if method.condenser for name in names_of(method.condenser)])
    histories = [history_of(question, data.messages[question.scenario]) for question in data.questions]
    orders = {method.name: [[order(past) for order in method.orders] for past in histories] for method in entrants}
    figures: list[Retention] = []
    for budget in budgets:
        baseline: dict[str, list[float]] = {}
        for method in entrants:
            values, used = {}, []
            for question, history, ordered in zip(data.questions, histories, orders[method.name], strict=True):
                pinned = count(history.pinned)
                total = count(history.messages) - pinned
                limit = Budget(tokens=pinned + int(total * budget), count=count, scorers=scorers)
                shown = [_filled(order, history, limit) for order in ordered]
                if method.condenser is not None:
                    shown = [asyncio.run(method.condenser.condense(history, limit, ())).units]
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
            advance()
    return tuple(figures)


def _filled(order: Sequence[int], history: History, budget: Budget) -> Sequence[Unit]:
    """The units in this order that still fit, each counted by itself."""
    empty = budget.count(history.pinned)
    room, chosen = budget.tokens - empty, []
    for position in order:
        cost = budget.count((*history.pinned, *history.units[position].messages)) - empty
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
