"""The Python interface: what ``import condensegrpo as cg`` offers.

    run = cg.train("quickstart", "train.steps=20")               a configuration and overrides, as on the command line
    run = cg.train("gsm8k", task=MyTask(), reward=my_reward)     objects in place of names
    run.metrics()                                                a DataFrame
    cg.rollout("runs/quickstart", n=4)[0].show()                 sample, and look at a trajectory
    cg.evaluate("runs/quickstart", samples=4).success

All of it works in a notebook: the engine's event loop has a thread of its own. Importing this file imports no torch.
"""

import os
import signal
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from operator import index
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, SupportsIndex, Unpack

from condensegrpo.core.errors import ConfigError, concise, concise_class
from condensegrpo.core.observer import Observer, Observers
from condensegrpo.core.process import temporary_folder
from condensegrpo.display.rollouts import Rollout, Rollouts
from condensegrpo.inspection.batches import choose
from condensegrpo.inspection.index import Index
from condensegrpo.reporting.frames import Library, frame, step_rows
from condensegrpo.storage.run_folder import RunFolder, read_metrics

__all__ = ["Rollout", "Rollouts", "Run", "evaluate", "rollout", "train"]

if TYPE_CHECKING:
    from condensegrpo.assembly.components import Components
    from condensegrpo.assembly.objects import Parts
    from condensegrpo.config.schema import RunConfig
    from condensegrpo.core.evaluation import Evaluation
    from condensegrpo.core.protocols.task import Problem, Split
    from condensegrpo.display.console import PhaseDisplay
    from condensegrpo.episodes.failures import Failures

ROLLOUT_STEP = -2  # names the random streams of rollouts apart from those of training and evaluation


@concise_class
class Run:
    """A run folder: what was measured and sampled in it. Reads files, and loads no model."""

    def __init__(self, path: str | Path) -> None:
        """Open a run.

        Raises:
            RunError: the folder does not exist or holds no run.
        """
        self._folder = RunFolder.open(Path(path))
        self._index = Index(self._folder.path)

    def __repr__(self) -> str:
        return f"Run({str(self.path)!r})"

    def __fspath__(self) -> str:
        """Its folder: a run can be given wherever a run folder can."""
        return str(self.path)

    @property
    def path(self) -> Path:
        """The folder."""
        return self._folder.path

    @property
    def config(self) -> "RunConfig":
        """The resolved configuration."""
        from condensegrpo.config.load import load_config

        return load_config(self._folder.config)

    @property
    def steps(self) -> tuple[int, ...]:
        """The steps that have trajectories."""
        return self._folder.steps()

    @property
    def model(self) -> str:
        """The model folder of the newest checkpoint.

        Raises:
            RunError: there is none yet.
        """
        from condensegrpo.assembly.policy import model_of

        return model_of(str(self.path))

    def metrics(self, library: Library | None = None) -> Any:  # noqa: ANN401  a DataFrame of either library
        """One row a step: docs/reference/metrics.md says what each column is. Step 0 is the policy before training."""
        return frame(step_rows(read_metrics(self._folder.metrics)), library)

    def rollouts(self, step: int | None = None, evaluation: str | None = None) -> Rollouts:
        """The trajectories of a step, by default the last one.

        Args:
            evaluation: those of this evaluation after the step, such as ``held-out``, in place of the training batch.

        Raises:
            RunError: there is no such step or evaluation.
        """
        return Rollouts(self._index.batch(choose(self.path, step, evaluation)))

    def trajectories(
        self, step: int | None = None, evaluation: str | None = None, library: Library | None = None
    ) -> Any:  # noqa: ANN401  a DataFrame of either library
        """One row a trajectory of a step, by default of all steps; arguments as of ``rollouts``, columns as there."""
        return frame([row for each in self._batches(step, evaluation) for row in each.trajectory_rows()], library)

    def turns(self, step: int | None = None, evaluation: str | None = None, library: Library | None = None) -> Any:  # noqa: ANN401  a DataFrame of either library
        """One row a turn of a step, by default of all steps; arguments as of ``rollouts``, columns as there."""
        return frame([row for each in self._batches(step, evaluation) for row in each.turn_rows()], library)

    def _batches(self, step: int | None, evaluation: str | None) -> Iterator[Rollouts]:
        steps = self._folder.steps() if evaluation is None else self._folder.evaluated_steps(evaluation)
        for number in steps if step is None and steps else (step,):
            yield self.rollouts(number, evaluation)


@concise
def train(
    config: "RunConfig | os.PathLike[str] | str",
    *overrides: str,
    resume: bool = False,
    overwrite: bool = False,
    observer: Observer | None = None,
    **parts: "Unpack[Parts]",
) -> Run:
    """Train a policy in this process: warm start, then GRPO on condensed multi-turn trajectories.

        cg.train("quickstart", "train.steps=20", "name=first")
        cg.train("gsm8k", task=MyTask(), reward=my_reward)
        cg.train("runs/first", "train.steps=40", resume=True)

    Ctrl-C, or an interrupt of the notebook's kernel, ends the training after the step and saves a checkpoint; the
    second one raises ``KeyboardInterrupt``. For several processes use ``condensegrpo train`` under a launcher. The
    arguments that are not explained here are those of ``rollout``.

    Args:
        resume: continue the run in the folder ``config``, from its newest checkpoint. Objects must be given again.
        overwrite: replace the run of the same name, which is deleted before this one begins.
        observer: receives progress; by default it is printed, and written to ``log.txt``.

    Raises:
        ConfigError: the configuration is wrong or cannot work with the model.
        RunError: there is a run of this name, or its folder cannot be written.
    """
    from condensegrpo.assembly.objects import configured
    from condensegrpo.display.console import TrainingConsole, quiet_libraries
    from condensegrpo.display.run_log import RunLog
    from condensegrpo.learner.launchers import check_alone
    from condensegrpo.training.run_setup import prepare_run

    _check_observer(observer)
    quiet_libraries()
    check_alone(
        os.environ,
        "training from Python",
        "each of them would train by itself. Use condensegrpo train with the launcher, and put objects into a file, "
        "named path/to/file.py:Name",
    )
    continued = RunFolder.open(Path(_named(config))) if resume else None
    settings, objects = configured(config, overrides, parts)
    prepared = prepare_run(settings, continued=continued, overwrite=overwrite, objects=objects)
    steps = settings.train.steps
    with (
        prepared.folder() as folder,
        RunLog(folder.log, steps=steps) as log,
        _shown(observer, lambda: TrainingConsole(steps=steps)) as shown,
        _interruptible() as stopping,
    ):
        prepared.train(folder, observer=Observers(log, shown), stopping=stopping)
    return Run(folder.path)


@concise
def rollout(
    config: "RunConfig | os.PathLike[str] | str",
    *overrides: str,
    model: str | os.PathLike[str] | None = None,
    n: int = 1,
    problems: "int | Sequence[Problem]" = 1,
    split: "Split" = "eval",
    observer: Observer | None = None,
    **parts: "Unpack[Parts]",
) -> Rollouts:
    """Sample and score trajectories as training does.

        cg.rollout("runs/quickstart", n=4)[0].show()
        cg.rollout("gsm8k", "rollout.temperature=0.6", model="Qwen/Qwen2.5-0.5B-Instruct", condenser="full")

    Args:
        config: a YAML file, the name of a shipped configuration, a run (``cg.Run``, or its folder) or a configuration.
        overrides: ``key=value``, as on the command line.
        model: a run, a checkpoint, a model folder or a Hub id; by default that of the run or configuration.
        n: trajectories of each problem.
        problems: the first so many of the split, or a list of problems.
        split: ``eval`` or ``train``.
        observer: receives progress; by default it is shown on a terminal.
        parts: task, reward, condenser, tools and sampler, as objects or by name, in place of the configuration's.

    Raises:
        ConfigError: the configuration is wrong, or names no model.
        TooManyFailed: every trajectory failed.
    """
    from condensegrpo.episodes.failures import check_failures

    _check_observer(observer)
    samples = _count("n", n)
    count = _count("problems", len(problems) if isinstance(problems, Sequence) else problems)
    components, source = _built(config, overrides, parts, model)
    posed = problems if isinstance(problems, Sequence) else components.problems(split)[:count]
    with _shown(observer) as shown:
        sampled, failures = sample_rollouts(components, source, posed, n=samples, observer=shown)
        check_failures([failures], shown)
    return sampled


def _count(name: str, given: SupportsIndex) -> int:
    """An argument that is a number of things; it may be one of numpy."""
    try:
        count = index(given)
    except TypeError:
        count = 0
    if count < 1:
        raise ConfigError(f"reading the arguments: {name} is {given!r}, wanted a whole number of at least 1.")
    return count


def sample_rollouts(
    components: "Components", source: str, problems: "Sequence[Problem]", *, n: int, observer: Observer
) -> "tuple[Rollouts, Failures]":
    """Sample and score ``n`` trajectories of each problem; also says which of them failed.

    Args:
        source: model folder or Hub id of the policy.
    """
    from condensegrpo.assembly.preflight import check_model
    from condensegrpo.assembly.runtime import provenance
    from condensegrpo.core.background_loop import PLUGIN_SECONDS, BackgroundLoop, Watch
    from condensegrpo.episodes.failures import failures_of
    from condensegrpo.episodes.group import problem_groups
    from condensegrpo.evaluation.evaluate import opened_policy
    from condensegrpo.learner.model_folder import trained_steps
    from condensegrpo.storage.media import MediaFolder
    from condensegrpo.storage.trajectories import write_trajectories

    settings, step = components.config, trained_steps(source)
    check_model(components, source)
    with ExitStack() as kept:
        folder = kept.enter_context(temporary_folder("rollouts"))
        media = MediaFolder(folder / "media")
        with opened_policy(settings, source, media=media, objects=components.objects) as players:
            observer.phase("sampling", len(problems) * n)
            watch = Watch(settings.rollout.limits.turn_seconds, observer.notice)
            with BackgroundLoop("rollout", close_seconds=PLUGIN_SECONDS, watch=watch) as loop:
                scored = loop.run(
                    players.player(components, temperature=settings.rollout.temperature).play(
                        problem_groups(problems, step=step or 0),
                        samples=n,
                        run_seed=settings.seed,
                        step=ROLLOUT_STEP,
                        on_scored=lambda _: observer.advance(),
                    )
                )
        file = folder / "rollouts.parquet"
        write_trajectories(file, scored, provenance(settings, model=source, step=step))
        batch = Index(file).batch(file)
        weakref.finalize(batch, kept.pop_all().close)  # every rollout holds it
    return Rollouts(batch), failures_of(scored)


@concise
def evaluate(
    config: "RunConfig | os.PathLike[str] | str",
    *overrides: str,
    model: str | os.PathLike[str] | None = None,
    samples: int | None = None,
    save: str | Path | None = None,
    observer: Observer | None = None,
    **parts: "Unpack[Parts]",
) -> "Evaluation":
    """Evaluate a policy on the held-out problems: success with its 95 % interval, pass@k, contexts, stop reasons.

    The trajectories and the figures of a run's policy are stored in the run, as ``condensegrpo eval`` stores them: the
    result's ``name`` is that of ``run.rollouts(evaluation=…)``.

        cg.evaluate("runs/quickstart", samples=4).success
        cg.evaluate("runs/quickstart", "rollout.limits.max_context_tokens=96", condenser="truncate").metrics

    The arguments that are not explained here are those of ``rollout``.

    Args:
        samples: trajectories a problem; by default ``evaluate.samples``.
        save: a new folder for the trajectories, in place of the run's.

    Raises:
        ConfigError: the configuration is wrong, or names no model.
        TooManyFailed: more than ``train.max_failed`` of the trajectories failed.
        RunError: the folder cannot be written.
    """
    from condensegrpo.assembly.policy import run_of_policy
    from condensegrpo.evaluation.evaluate import evaluate_policy
    from condensegrpo.learner.launchers import check_alone

    check_alone(os.environ)

    _check_observer(observer)
    changes = (*overrides, *([] if samples is None else [f"evaluate.samples={samples}"]))
    components, source = _built(config, changes, parts, model)
    command = f"condensegrpo.evaluate({', '.join(map(repr, (_named(config), *changes)))}, model={source!r}, **{parts})"
    folder = None if save is None else Path(save)
    with _shown(observer) as shown:
        return evaluate_policy(
            components, source, save=folder, run=run_of_policy(source), observer=shown, command=command
        )


def _named(config: "RunConfig | os.PathLike[str] | str") -> str:
    """The file, folder or name that gives a configuration; the name of one that is given itself."""
    return os.fspath(config) if isinstance(config, str | os.PathLike) else config.name


def _built(
    config: "RunConfig | os.PathLike[str] | str",
    overrides: Sequence[str],
    parts: "Parts",
    model: str | os.PathLike[str] | None,
) -> "tuple[Components, str]":
    """The components of a configuration without variants, and the model folder or Hub id of its policy."""
    from condensegrpo.assembly.build import build
    from condensegrpo.assembly.objects import configured
    from condensegrpo.display.console import quiet_libraries

    quiet_libraries()
    settings, objects = configured(config, ["evaluate.variants={}", *overrides], parts)
    source = _model(config, settings, model)
    return build(settings, objects=objects), source


def _model(
    config: "RunConfig | os.PathLike[str] | str", settings: "RunConfig", model: str | os.PathLike[str] | None
) -> str:
    """The model folder or Hub id of the argument, or else that of the run or of the configuration."""
    from condensegrpo.assembly.policy import model_of, run_of_policy
    from condensegrpo.config.schema import RunConfig

    if model is not None:
        return model_of(os.fspath(model))
    if not isinstance(config, RunConfig) and run_of_policy(os.fspath(config)) is not None:
        return model_of(os.fspath(config))
    if settings.model.path is None:
        raise ConfigError(
            f"looking for the policy of {settings.name}: its configuration makes a new model (model.new), which no run "
            f"has trained yet. Give model=…: a run folder, a model folder or a Hub id."
        )
    return settings.model.path


def _check_observer(observer: Observer | None) -> None:
    """Raise ConfigError if an observer lacks a method of ``Observer``."""
    reports = [name for name in vars(Observer) if not name.startswith("_")]
    lacking = [name for name in reports if not callable(getattr(observer, name, None))]
    if observer is not None and lacking:
        raise ConfigError(
            f"taking the observer: {type(observer).__name__} has no {', '.join(lacking)}. Give an instance of a "
            f"subclass of condensegrpo.core.observer.Observer, whose methods do nothing by themselves."
        )


@contextmanager
def _shown(observer: Observer | None, display: "Callable[[], PhaseDisplay] | None" = None) -> Iterator[Observer]:
    """The observer, or else a display on the terminal: by default of the current phase alone."""
    from condensegrpo.display.console import PhaseDisplay
    from condensegrpo.display.theme import EscapingConsole

    if observer is not None:
        yield observer
        return
    with display() if display else PhaseDisplay(EscapingConsole(stderr=True)) as shown:
        yield shown


@contextmanager
def _interruptible() -> Iterator[Callable[[], bool]]:
    """Whether Ctrl-C requested a stop. The second Ctrl-C raises ``KeyboardInterrupt``. Threads get no signal."""
    received = list[int]()

    def handle(number: int, _: FrameType | None) -> None:
        received.append(number)
        signal.signal(number, signal.default_int_handler)
        print("finishing the step, then saving; interrupt again to stop now", file=sys.stderr)  # noqa: T201  no logger in a signal handler

    if threading.current_thread() is not threading.main_thread():
        yield lambda: False
        return
    before = signal.signal(signal.SIGINT, handle)
    try:
        yield lambda: bool(received)
    finally:
        signal.signal(signal.SIGINT, before)
