"""Evaluations that are kept: in the folder of the run that the policy is of, or in a new folder."""

from pathlib import Path

from condensegrpo.assembly.components import Components
from condensegrpo.assembly.players import Players
from condensegrpo.config.load import HELD_OUT
from condensegrpo.core.evaluation import Evaluation
from condensegrpo.core.observer import Observer
from condensegrpo.evaluation.evaluate import evaluate
from condensegrpo.learner.policy import save_tokenizer
from condensegrpo.storage.evaluations import Place, new_name, store_evaluation
from condensegrpo.storage.run_folder import RunFolder, evaluation_file


def evaluate_into(
    place: Place, components: Components, *, players: Players, step: int | None, observer: Observer, command: str
) -> Evaluation:
    """Evaluate on the held-out problems, and keep trajectories and figures.

    Args:
        command: what asked for it, for the file in the run.
    """
    if isinstance(place, RunFolder) and step is not None:
        with new_name(place, step) as name:
            stored = place.evaluation(step, name)
            result = evaluate(name, components, players=players, step=step, observer=observer, file=stored)
            store_evaluation(place, step, result, command)
        return result
    if isinstance(place, Path):
        save_tokenizer(players.source, place)
    file = place / evaluation_file(HELD_OUT) if isinstance(place, Path) else None
    return evaluate(HELD_OUT, components, players=players, step=step, observer=observer, file=file)
