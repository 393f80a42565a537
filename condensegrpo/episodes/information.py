"""How much information a context holds about the answer: log π(ground truth | c_t), measured before every turn.

The ground truth is measured as the policy would write it: with the form ``<answer>{answer}</answer>``

    I_t = log π(answer </answer> | c_t, <answer>)      nats, at temperature 1

so that neither the decision to answer now nor the opening tag counts. The sampler measures it with the weights that the
turn is sampled from. The policy does not see it, and it is not trained on.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from condensegrpo.core.errors import SamplerError
from condensegrpo.core.protocols.sampler import Measures
from condensegrpo.core.protocols.task import Problem
from condensegrpo.episodes.render import Renderer
from condensegrpo.episodes.settings import PLACE


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerProbe:
    """Measures the log-probability of the ground truth after a prompt."""

    model: Measures
    renderer: Renderer
    form: str  # of an answer, with ``PLACE`` in it once

    async def measure(self, problem: Problem, prompt_ids: Sequence[int], media: Sequence[str] = ()) -> float | None:
        """I_t of a prompt, in nats, at most 0; None for a problem without ground truth.

        Raises:
            SamplerError: the sampler cannot measure it, or the prompt shows ``media``.
        """
        if media:
            raise SamplerError(
                "measuring what a context knows of the answer: it shows pictures, which are not measured. Set "
                "rollout.answer_form=null."
            )
        if problem.answer is None:
            return None
        before, _, after = self.form.partition(PLACE)
        opening = self.renderer.text_ids(before)
        written = self.renderer.text_ids(problem.answer + after)
        return math.fsum(await self.model.measure((*prompt_ids, *opening), written))
