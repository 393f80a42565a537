"""Scorers: a model's attention from the question and the last output, as one score for each unit of a history.

A history is split into pages that fit the model, so that the cost of all passes is linear in its length:

    history  pinned u0 u1 u2 u3 u4          u4 is the newest: its reply is the last output
    pages    pinned u0 u1 u4                as many units as fit, in order, each page followed by the newest
             pinned u2 u3 u4

``LeaveOneOut`` is the oracle: a unit's score is the probability that the newest output loses without it. It costs one
pass per unit: for tests and analysis. ``ScriptedScorer`` is the public fake and needs no model. Scores are cached by
the content of a history, the longest prompt and the version of the weights.

Legend: P prompt tokens.
"""

import asyncio
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from statistics import fmean
from typing import NamedTuple

from condensegrpo.core.errors import SamplerError
from condensegrpo.core.messages import History, Unit, flatten
from condensegrpo.core.protocols.sampler import AttentionQuery, Sampler, TokenAttention
from condensegrpo.core.request_queue import SharedResults
from condensegrpo.episodes.render import LocatedPrompt, Renderer

CACHED = 4096  # histories whose scores are kept


class ScoreKey(NamedTuple):
    """The inputs of scores. Equal by content; the hash reads the newest unit only, however long the history is."""

    history: History
    tokens: int  # of the longest prompt
    version: int  # optimiser step of the weights

    def __hash__(self) -> int:
        """Differs where the newest replies differ, which is where trajectories differ."""
        newest = self.history.units[-1].reply.text if self.history.units else ""
        return hash((len(self.history.units), newest, self.tokens, self.version))


@dataclass(slots=True, eq=False)
class ModelScorer:
    """Scores by a model: of a history once, also for callers that need them at the same time."""

    model: Sampler  # the sampler that holds the weights
    renderer: Renderer  # with that model's tokenizer and chat template
    _results: SharedResults[ScoreKey, tuple[float, ...]] = field(
        default_factory=lambda: SharedResults(CACHED), init=False
    )

    async def score(self, histories: Sequence[History], tokens: int) -> Sequence[Sequence[float]]:
        """The score of every unit of each history, not negative; 0 for the newest, which holds the last output.

        Args:
            tokens: of the longest prompt.
        """
        keys = [ScoreKey(history, tokens, self.model.version) for history in histories]
        return await asyncio.gather(*(self._results.get(key, partial(self.computed, key)) for key in keys))

    async def computed(self, key: ScoreKey) -> tuple[float, ...]:
        """The scores of a history."""
        raise NotImplementedError


MIN_TOKENS = 16  # of older units on a page, however long the pinned messages and the newest unit are


class UnitTokens(NamedTuple):
    """The tokens of a unit, with the chat template's tokens before each of its messages."""

    ids: tuple[int, ...]
    content: tuple[int, ...]  # indices in ids of the content of its messages
    reply: tuple[int, ...]  # indices of its reply's content
    pictures: tuple[tuple[str, range], ...] = ()  # hashes, and indices in ids

    @property
    def media(self) -> tuple[str, ...]:
        """The hashes of its pictures."""
        return tuple(sha256 for sha256, _ in self.pictures)

    def truncated(self, room: int) -> "UnitTokens":
        """Its first ``room`` tokens; fewer where a picture would be cut."""
        if len(self.ids) <= room:
            return self
        room = min([span.start for _, span in self.pictures if span.stop > room], default=room)
        return UnitTokens(
            self.ids[:room],
            tuple(index for index in self.content if index < room),
            tuple(index for index in self.reply if index < room),
            tuple(shown for shown in self.pictures if shown[1].stop <= room),
        )


class Page(NamedTuple):
    """A prompt for one pass, with the tokens of its units."""

    ids: tuple[int, ...]
    units: tuple[tuple[int, ...], ...]  # indices in ids of the units' contents; the newest is on every page, not here
    last_output: tuple[int, ...]  # indices in ids of the newest unit's reply
    media: tuple[str, ...]  # the hashes of its pictures, in order


class HistoryTokens(NamedTuple):
    """A history's prompt, split; the parts in order are the prompt."""

    pinned: tuple[int, ...]
    units: tuple[UnitTokens, ...]
    end: tuple[int, ...]  # tokens of the template after the last message
    pinned_media: tuple[str, ...] = ()  # the hashes of the pictures of the pinned messages


def split_history(history: History, located: LocatedPrompt) -> HistoryTokens:
    """The prompt of a history, split where a message ends: the template's introduction of a message belongs to it."""
    after = last = max((span.stop for span in located.spans[: len(history.pinned)]), default=0)
    message = len(history.pinned)
    pinned_media = tuple(part.sha256 for pinned in history.pinned for part in pinned.media)
    spans = iter(located.pictures[len(pinned_media) :])
    units = []
    for unit in history.units:
        contents = located.spans[message : message + len(unit.messages)]
        shown = [(part.sha256, next(spans)) for each in unit.messages for part in each.media]
        end = max(last, *(span.stop for span in contents))
        content = {index - last for span in (*contents, *(span for _, span in shown)) for index in span}
        units.append(
            UnitTokens(
                located.ids[last:end],
                tuple(sorted(content)),  # a template may show a picture before what it says of the message
                tuple(index - last for index in contents[0]),
                tuple((sha256, range(span.start - last, span.stop - last)) for sha256, span in shown),
            )
        )
        last, message = end, message + len(contents)
    return HistoryTokens(located.ids[:after], tuple(units), located.ids[last:], pinned_media)


def pages(tokens: HistoryTokens, room: int) -> Iterator[Page]:
    """The pages of a history with at least two units, of at most ``room`` tokens if the pinned messages
    and the newest unit leave some.

    The newest unit is truncated to half of what the pinned messages leave, an older unit to a page.
    """
    left = room - len(tokens.pinned) - len(tokens.end)
    newest = tokens.units[-1].truncated(max(left // 2, MIN_TOKENS))
    left = max(left - len(newest.ids), MIN_TOKENS)
    older = [unit.truncated(left) for unit in tokens.units[:-1]]
    page, length = list[UnitTokens](), 0
    for unit in older:
        if page and length + len(unit.ids) > left:
            yield _page(tokens, page, newest)
            page, length = [], 0
        page.append(unit)
        length += len(unit.ids)
    if page:
        yield _page(tokens, page, newest)


def _page(tokens: HistoryTokens, older: Sequence[UnitTokens], newest: UnitTokens) -> Page:
    ids, units, media = list(tokens.pinned), [], [*tokens.pinned_media]
    for unit in older:
        units.append(tuple(len(ids) + index for index in unit.content))
        ids += unit.ids
        media += unit.media
    last_output = tuple(len(ids) + index for index in newest.reply)
    return Page((*ids, *newest.ids, *tokens.end), tuple(units), last_output, (*media, *newest.media))


SINKS = 4  # first tokens of a prompt, which draw attention whatever their content
TOP = 0.2  # share of a unit's tokens whose mean is its score


def unit_scores(
    attention: TokenAttention, units: Sequence[Sequence[int]], *, sinks: int = SINKS, top: float = TOP
) -> tuple[float, ...]:
    """How much more attention than the calibration's each unit gets.

        s_j = P · (a_j − b_j),      score of a unit = mean of the largest ⌈top · tokens⌉ of its s_j, or 0 if negative

    with a the attention of the question and the last output, b that of the calibration. P makes prompts of different
    lengths comparable: a token with an even share of all attention has P · a_j = 1. Subtracting b is the calibration of
    in-context re-ranking (https://arxiv.org/abs/2410.02642, sec. 3.2). The template's tokens are in no unit and, like
    the sinks, are never scored. Their attention is not redistributed to the units: a question without an answer on a
    page attends to the sinks, which means that the page's units are not needed.

        a .1 .3 .1, b .1 .1 .1, one token per unit, P = 3   ─▶   0;   3 · (.3 − .1) = .6;   0

    Args:
        attention: of an attention query.
        units: the indices in its prompt of each unit.

    Returns:
        One number per unit, not negative: 0 means no more attention than in the calibration.
    """
    size = len(attention.question)
    pairs = zip(attention.question, attention.calibration, strict=True)
    excess = [size * (question - calibration) for question, calibration in pairs]
    by_unit = ([excess[index] for index in indices if index >= sinks] for indices in units)
    largest = [sorted(values, reverse=True)[: max(math.ceil(top * len(values)), 1)] for values in by_unit]
    return tuple(max(fmean(values), 0.0) if values else 0.0 for values in largest)


def check_text(history: History) -> None:
    """Check that a history shows no pictures: their placeholders alone would be scored."""
    if any(message.media for message in history.messages):
        raise SamplerError(
            "scoring the units of a history: it shows pictures, which scorers do not see. Use a condenser that needs "
            "no scorer."
        )


CALIBRATION = "N/A"  # question without content, for calibration
WINDOW = 64  # most query tokens: half of them from the question


@dataclass(slots=True, eq=False)
class AttentionScorer(ModelScorer):
    """Scores by the attention of the policy or of a frozen model."""

    layers: Sequence[int] = ()  # whose attention is captured, from 0 on; none: up to three from the middle to the end
    window: int = WINDOW  # most query tokens, at least 2

    async def computed(self, key: ScoreKey) -> tuple[float, ...]:
        """The scores of a history."""
        history, calibration = key.history, self.renderer.text_ids(CALIBRATION)
        if len(history.units) < 2:
            return (0.0,) * len(history.units)
        if self.renderer.pictures is None:
            check_text(history)
        # the end of the last pinned message with words that a user wrote; pictures are left out
        texts = (message.text_without_media for message in reversed(history.pinned) if message.role == "user")
        text = next((words for words in texts if words.strip()), "")
        question = self.renderer.text_ids(text)[-(self.window // 2) :] or calibration
        room = key.tokens - max(len(question), len(calibration))
        parts = list(pages(split_history(history, self.renderer.content_spans(history.messages)), room))
        queries = (
            AttentionQuery(
                prompt_ids=page.ids,
                positions=page.last_output[-(self.window - self.window // 2) :],
                question_ids=question,
                calibration_ids=calibration,
                layers=tuple(self.layers),
                media=page.media,
            )
            for page in parts
        )
        attentions = await asyncio.gather(*map(self.model.attend, queries))
        by_page = [unit_scores(attention, page.units) for page, attention in zip(parts, attentions, strict=True)]
        return (*(score for scores in by_page for score in scores), 0.0)


class ScriptedScorer:
    """``ScriptedScorer(lambda unit: float("gold" in unit.reply.text))`` scores 1 for units that mention gold."""

    def __init__(self, score: Callable[[Unit], float]) -> None:
        """Set the script.

        Args:
            score: of a unit, not negative.
        """
        self._score = score
        self.sizes: list[int] = []  # number of units of each history scored

    async def score(self, histories: Sequence[History], tokens: int) -> Sequence[Sequence[float]]:
        """The scripted scores."""
        self.sizes += [len(history.units) for history in histories]
        return [[self._score(unit) for unit in history.units] for history in histories]


class LeaveOneOut(ModelScorer):
    """Scores by the loss of the newest reply without each unit before it, in nats. Prompts are measured whole."""

    async def score(self, histories: Sequence[History], tokens: int) -> Sequence[Sequence[float]]:
        """The scores of each history, once whatever its ``tokens`` are."""
        del tokens
        return await ModelScorer.score(self, histories, 0)

    async def computed(self, key: ScoreKey) -> tuple[float, ...]:
        """The scores of a history."""
        history = key.history
        if not history.units:
            return ()
        check_text(history)
        before = History(pinned=history.pinned, units=history.units[:-1])
        output = self.renderer.reply_ids(history.units[-1].reply.text)
        return (*(max(loss, 0.0) for loss in await losses(self.model, self.renderer, before, output)), 0.0)


async def losses(model: Sampler, renderer: Renderer, history: History, output_ids: Sequence[int]) -> list[float]:
    """The log-probability that an output loses without each unit of its history.

        log π(o | pinned, u_0 … u_n) − log π(o | pinned, u_0 … u_n without u_i),  nats, for every i

    Args:
        output_ids: (A,) as sampled, at least one.
    """

    async def logprob(units: Sequence[int]) -> float:
        shown = flatten(history.pinned, [history.units[index] for index in units])
        return sum(await model.score(renderer.prompt(shown), output_ids))

    every = range(len(history.units))
    with_all, *without = await asyncio.gather(
        logprob(every), *(logprob([index for index in every if index != left_out]) for left_out in every)
    )
    return [with_all - reduced for reduced in without]
