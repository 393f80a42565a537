"""The scorer that takes a model's attention from the question and the last output to the units of a history."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

from condensegrpo.attention.scorer import Page, ScoreCache, check_text, pages, split_history, unit_scores
from condensegrpo.core.messages import History
from condensegrpo.core.protocols.attention import Attends, AttentionQuery
from condensegrpo.episodes.render import Renderer

CALIBRATION = "N/A"  # question without content, for calibration
WINDOW = 64  # most query tokens: half of them from the question


class VersionedAttention(Attends, Protocol):
    """A sampler that captures attention and has a version of its weights."""

    @property
    def version(self) -> int:
        """The optimiser step whose weights are in use."""


@dataclass(slots=True, eq=False)
class AttentionScorer:
    """Scores by the attention of the policy or of a frozen model. Scores are cached by history and weights.

    Trajectories whose histories are equal share one pass.
    """

    model: VersionedAttention  # the sampler that holds the weights
    renderer: Renderer  # with that model's tokenizer and chat template
    layers: Sequence[int] = ()  # whose attention is captured, from 0 on; none: up to three from the middle to the end
    window: int = WINDOW  # most query tokens, at least 2
    _calibration: tuple[int, ...] = field(init=False)
    _cache: ScoreCache = field(default_factory=ScoreCache, init=False)

    def __post_init__(self) -> None:
        self._calibration = self.renderer.text_ids(CALIBRATION)

    async def score(self, histories: Sequence[History], tokens: int) -> Sequence[Sequence[float]]:
        """The score of every unit, not negative; 0 for the newest, which holds the last output.

        Raises:
            SamplerError: the model cannot compute them.
        """
        return await self._cache.scores(histories, tokens, self.model.version, partial(self._read, tokens=tokens))

    async def _read(self, history: History, *, tokens: int) -> tuple[float, ...]:
        if len(history.units) < 2:
            return (0.0,) * len(history.units)
        if self.renderer.pictures is None:
            check_text(history)
        question = self._question(history)
        room = tokens - max(len(question), len(self._calibration))
        parts = list(pages(split_history(history, self.renderer.located(history.messages)), room))
        attentions = await asyncio.gather(*(self.model.attend(self._query(page, question)) for page in parts))
        by_page = [unit_scores(attention, page.units) for page, attention in zip(parts, attentions, strict=True)]
        return (*(score for scores in by_page for score in scores), 0.0)

    def _question(self, history: History) -> tuple[int, ...]:
        """The end of the question: of the last pinned message with words that a user wrote. Pictures are left out."""
        texts = (message.words for message in reversed(history.pinned) if message.role == "user")
        text = next((words for words in texts if words.strip()), "")
        return self.renderer.text_ids(text)[-(self.window // 2) :] or self._calibration

    def _query(self, page: Page, question: tuple[int, ...]) -> AttentionQuery:
        return AttentionQuery(
            prompt_ids=page.ids,
            positions=page.last_output[-(self.window - self.window // 2) :],
            question_ids=question,
            calibration_ids=self._calibration,
            layers=tuple(self.layers),
            media=page.media,
        )
