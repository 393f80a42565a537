"""The scorer that reads a history with a model and takes what the question and the last output look at."""

import asyncio
from collections.abc import Sequence
from typing import Protocol

from condensegrpo.attention.pages import Page, pages, pieces
from condensegrpo.attention.scores import unit_scores
from condensegrpo.core.messages import History
from condensegrpo.core.protocols import Attends, Reading, TokenAttention
from condensegrpo.rollout.render import Renderer

BLANK = "N/A"  # what is asked for calibration
WINDOW = 64  # most tokens whose attention is taken: half of them of the question
KNOWN = 4096  # histories whose scores are remembered


class Reader(Attends, Protocol):
    """A sampler that can say what its model looks at."""

    @property
    def version(self) -> int:
        """The optimiser step whose weights are in use."""


class AttentionScorer:
    """Scores by the attention of the policy or of a frozen model. Scores are remembered by history and weights."""

    def __init__(self, model: Reader, renderer: Renderer, *, layers: Sequence[int] = (), window: int = WINDOW) -> None:
        """Set the scorer up.

        Args:
            model: the sampler that holds the weights.
            renderer: with that model's tokenizer and chat template.
            layers: that are watched, from 0 on; none: a few from the middle to near the end.
            window: most tokens whose attention is taken, at least 2.
        """
        self._model = model
        self._renderer = renderer
        self._layers = tuple(layers)
        self._window = window
        self._blank = renderer.text_ids(BLANK)
        self._known: dict[tuple[History, int, int], tuple[float, ...]] = {}

    async def score(self, histories: Sequence[History], tokens: int) -> Sequence[Sequence[float]]:
        """The score of every unit, not negative; 0 for the newest, where the last output stands.

        Raises:
            SamplerError: the model cannot read them.
        """
        return await asyncio.gather(*(self._scored(history, tokens) for history in histories))

    async def _scored(self, history: History, tokens: int) -> tuple[float, ...]:
        key = (history, tokens, self._model.version)
        if key not in self._known:
            scores = await self._read(history, tokens)
            while len(self._known) >= KNOWN:
                del self._known[next(iter(self._known))]  # the oldest
            self._known[key] = scores
        return self._known[key]

    async def _read(self, history: History, tokens: int) -> tuple[float, ...]:
        if len(history.units) < 2:
            return (0.0,) * len(history.units)
        question = self._question(history)
        room = tokens - max(len(question), len(self._blank))
        cut = list(pages(pieces(history, self._renderer.located(history.messages)), room))
        found = await asyncio.gather(*(self._model.attend(self._reading(page, question)) for page in cut))
        return (*(score for page, attention in zip(cut, found, strict=True) for score in _scores(page, attention)), 0.0)

    def _question(self, history: History) -> tuple[int, ...]:
        """The end of the question: of the last pinned message that a user wrote."""
        asked = next((one.content for one in reversed(history.pinned) if one.role == "user"), "")
        return self._renderer.text_ids(asked)[-(self._window // 2) :] or self._blank

    def _reading(self, page: Page, question: tuple[int, ...]) -> Reading:
        return Reading(
            trunk_ids=page.ids,
            asked=page.last_output[-(self._window - self._window // 2) :],
            question_ids=question,
            blank_ids=self._blank,
            layers=self._layers,
        )


def _scores(page: Page, attention: TokenAttention) -> tuple[float, ...]:
    return unit_scores(attention, page.places)
