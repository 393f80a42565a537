"""Opens a policy for sampling, and keeps its evaluations: in the folder of its run, or in a new folder."""

from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from condensegrpo.assembly.components import Components
from condensegrpo.assembly.model_checks import check_model
from condensegrpo.assembly.objects import NO_OBJECTS, Objects
from condensegrpo.assembly.players import Players
from condensegrpo.assembly.runtime import open_sampler, open_writer, use_threads
from condensegrpo.config.load import HELD_OUT
from condensegrpo.config.schema import RunConfig
from condensegrpo.core.evaluation import Evaluation
from condensegrpo.core.observer import Observer
from condensegrpo.evaluation.evaluate import evaluate
from condensegrpo.evaluation.policy import in_use, initial_of
from condensegrpo.learner.checkpoint import verify_model
from condensegrpo.learner.model_folder import save_tokenizer, trained_steps
from condensegrpo.storage.evaluations import destination_of, kept_if_begun, new_name, store_evaluation
from condensegrpo.storage.media import MediaFolder
from condensegrpo.storage.run_folder import RunFolder, evaluation_file


@contextmanager
def opened_policy(
    config: RunConfig, source: str, *, media: MediaFolder | None = None, objects: Objects = NO_OBJECTS
) -> Iterator[Players]:
    """The players of a policy: a model folder or Hub id. A sampler among ``objects`` is not closed at the end.

    Pictures are stored in ``media``, by default in a folder that is removed at the end. A checkpoint's files are
    compared with their hashes, and its run does not remove it meanwhile.
    """
    use_threads(config)
    with ExitStack() as opened:
        opened.enter_context(in_use(source))
        verify_model(Path(source))
        if media is None:
            media = MediaFolder(Path(opened.enter_context(TemporaryDirectory(prefix="condensegrpo-media-"))))
        sampler = open_sampler(config, source, objects=objects, media=media)
        if config.sampler.name not in objects:
            opened.enter_context(closing(sampler))
        writer = open_writer([config], initial_of(source, config), media)
        yield opened.enter_context(Players(config, sampler, source, media, writer=writer))


def evaluate_policy(
    components: Components, source: str, *, save: Path | None, run: Path | None, observer: Observer, command: str
) -> Evaluation:
    """Evaluate a policy on the held-out problems, and keep trajectories and figures.

    Args:
        source: the model folder or Hub id of the policy.
        save: a new folder for the trajectories, in place of the run's.
        run: the folder of the run that the policy is of, if any.
        command: that started the evaluation, for the file in the run.

    Raises:
        ConfigError: the configuration cannot work with the model.
        TooManyFailed: more than ``train.max_failed`` of the trajectories failed.
        RunError: the folder exists or cannot be written.
    """
    step = trained_steps(source)
    check_model(components, source)
    target = destination_of(save, run, step)
    media = None if target is None else MediaFolder((target if isinstance(target, Path) else target.path) / "media")
    opening = opened_policy(components.config, source, media=media, objects=components.objects)
    with kept_if_begun(save), opening as players:
        if isinstance(target, RunFolder) and step is not None:
            with new_name(target, step) as name:
                stored = target.evaluation(step, name)
                result = evaluate(name, components, players=players, step=step, observer=observer, file=stored)
                store_evaluation(target, step, result, command)
            return result
        if isinstance(target, Path):
            save_tokenizer(source, target)
        file = target / evaluation_file(HELD_OUT) if isinstance(target, Path) else None
        return evaluate(HELD_OUT, components, players=players, step=step, observer=observer, file=file)
