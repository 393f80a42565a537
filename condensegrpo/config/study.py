"""Study files: arms × seeds of ordinary runs. ``load_study`` reads one; ``Study.config_of`` gives a configuration."""

from importlib.resources import files
from itertools import chain
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, model_validator

from condensegrpo.config.load import HELD_OUT, find_config, load_config
from condensegrpo.config.schema import Name, RunConfig
from condensegrpo.config.yaml_tree import Section, override, parse, read_yaml
from condensegrpo.core.errors import ConfigError
from condensegrpo.core.wording import did_you_mean

# What the initial policy does not depend on; of the rest any difference means another warm start. The condenser and its
# trigger are not among them: an expert plays under both.
NOT_USED = frozenset({"name", "runs_dir", "reward", "algorithm", "train", "evaluate", "trackers", "sandbox"})
FIGURES = ("success", "context_tokens", "calls", "prompt_tokens", "prompt_tokens_uncached", "output_tokens")
STUDIES = Path(str(files("condensegrpo.configs"))).with_name("studies")  # that are shipped


class Prediction(Section):
    """A claim that the results will be compared with, written before a run of the study: it needs a threshold."""

    claim: str
    """In words."""
    arm: Name
    """The arm that it is about."""
    minus: Name | None = None
    """An arm whose figure is subtracted; null: the figure of the arm alone."""
    times: float = Field(default=1.0, gt=0)
    """Factor of the subtracted figure: 0.8 with below 0 claims at least a fifth less."""
    figure: str = "success"
    """After training: success, context_tokens, calls, output_tokens, prompt_tokens (all that is read),
    prompt_tokens_uncached (with a prefix cache), or one of report.metrics."""
    evaluation: str = HELD_OUT
    """Name of the evaluation."""
    minus_evaluation: str | None = None
    """Name of the evaluation of the subtracted figure; null: the same."""
    above: float | None = None
    """The claim holds if the whole interval lies above this, and fails if it lies below."""
    below: float | None = None
    """Likewise the other way round; one of the two is needed."""

    @model_validator(mode="after")
    def _has_one_threshold(self) -> "Prediction":
        if (self.above is None) == (self.below is None):
            raise ValueError(f"the prediction {self.claim!r} needs either above or below, a number")
        return self

    @property
    def threshold(self) -> float:
        """The number of ``above`` or ``below``."""
        return next(number for number in (self.above, self.below) if number is not None)

    @property
    def text(self) -> str:
        """``trained − 0.25 × full in context_tokens < 0``."""
        factor = "" if self.times == 1 else f"{self.times:g} × "
        second = "" if self.minus_evaluation is None else f" ({self.minus_evaluation})"
        contrast = self.arm if self.minus is None else f"{self.arm} − {factor}{self.minus}{second}"
        return f"{contrast} in {self.figure} {'>' if self.below is None else '<'} {self.threshold:g}"


class Pilots(Section):
    """Runs that settings are chosen with, by ``condensegrpo sweep --pilots``: other seeds, other held-out problems."""

    seeds: list[Annotated[int, Field(ge=0)]] = Field(min_length=1)
    """None of them may be a seed of the study."""
    overrides: list[str]
    """key=value overrides that give other held-out problems, such as evaluate.skip=256."""


class StudyReport(Section):
    """What the results of a study show."""

    evaluations: list[str] | None = None
    """Names of evaluations: held-out, and those of evaluate.variants; null: all that the arms share."""
    metrics: list[str] = []
    """Further columns: metrics of an evaluation, such as turns or tool_calls_valid, as means over seeds."""
    baseline: Name | None = None
    """The arm that every other arm is compared with; null: the first."""
    reach: float = Field(default=0.8, gt=0, le=1)
    """Held-out success whose first step the table shows, from the evaluations during training."""


class Study(Section):
    """Arms × seeds of ordinary runs of one configuration."""

    name: Name
    """Of the folder of the study, below ``runs``."""
    question: str | None = None
    """What the study answers; the results begin with it."""
    config: str
    """Base of every run: a YAML file beside the study file, or as the CONFIG of ``condensegrpo train``."""
    seeds: list[Annotated[int, Field(ge=0)]] = Field(min_length=1)
    """Every arm has a run of each; at least ten for a claim: fewer are noted in the results."""
    overrides: list[str] = []
    """key=value overrides of every arm."""
    arms: dict[Name, list[str]] = Field(min_length=1)
    """Name of an arm → its key=value overrides."""
    predictions: list[Prediction] = []
    """Claims, written before the first run; the results say which of them hold."""
    pilots: Pilots | None = None
    """Runs that settings are chosen with; null: none."""
    report: StudyReport = StudyReport()
    hours: float | None = Field(default=None, gt=0)
    """Hours after which a sweep starts no further run; calling it again continues. null: no limit."""

    @model_validator(mode="after")
    def _names_fit(self) -> "Study":
        if len(set(self.seeds)) < len(self.seeds):
            raise ValueError(f"seeds: {self.seeds} has a seed twice; its runs would be equal")
        pilots = self.pilots.overrides if self.pilots else []
        for change in chain(self.overrides, pilots, *self.arms.values()):
            if change.partition("=")[0] in ("seed", "name", "runs_dir"):
                raise ValueError(
                    f"the override {change} would be lost: every run has its seed from seeds, and its own folder"
                )
        named = [("report.baseline", self.report.baseline)]
        named += [("predictions", arm) for each in self.predictions for arm in (each.arm, each.minus)]
        for key, arm in named:
            if arm is not None and arm not in self.arms:
                known = ", ".join(self.arms)
                raise ValueError(f"{key}: there is no arm {arm!r}. {did_you_mean(arm, tuple(self.arms))}Arms: {known}")
        figures = (*FIGURES, *self.report.metrics)
        if unknown := [each.figure for each in self.predictions if each.figure not in figures]:
            raise ValueError(
                f"predictions: the results have no figure {unknown[0]!r}. {did_you_mean(unknown[0], figures)}"
                f"Figures: {', '.join(figures)}; report.metrics adds others"
            )
        if self.pilots is not None and (both := sorted({*self.seeds} & {*self.pilots.seeds})):
            raise ValueError(f"pilots.seeds: {both} are seeds of the study too, which would report what was tuned on")
        return self

    @property
    def baseline(self) -> str:
        """The arm that the others are compared with."""
        return self.report.baseline or next(iter(self.arms))

    def pilot_study(self) -> "Study":
        """The same arms with the seeds and problems of the pilots; it predicts nothing."""
        if self.pilots is None:
            raise ConfigError(
                f"running the pilots of the study {self.name}: it has none. Add pilots, or drop --pilots."
            )
        overrides = [*self.overrides, *self.pilots.overrides]
        changes = {"name": f"{self.name}-pilots", "seeds": self.pilots.seeds, "overrides": overrides}
        return self.model_copy(update={**changes, "predictions": [], "pilots": None})

    def run_arguments(self, arm: str, seed: int, out: Path) -> tuple[str, ...]:
        """The arguments of ``condensegrpo train`` for one run; its folder is ``out/ARM-seedN``."""
        identity = (f"seed={seed}", f"name={run_name(arm, seed)}", override("runs_dir", str(out)))
        return (self.config, *self.overrides, *self.arms[arm], *identity)

    def config_of(self, arm: str, seed: int, out: Path) -> RunConfig:
        """The configuration of one run."""
        path, *overrides = self.run_arguments(arm, seed, out)
        try:
            config = load_config(Path(path), overrides)
        except ConfigError as error:
            raise ConfigError(f"the arm {arm} of the study {self.name}: {error}") from error
        known = (HELD_OUT, *config.evaluate.variants)
        named = [("report.evaluations", name) for name in self.report.evaluations or ()]
        named += [("predictions", each.evaluation) for each in self.predictions if each.arm == arm]
        named += [
            ("predictions", each.minus_evaluation or each.evaluation) for each in self.predictions if each.minus == arm
        ]
        for key, name in named:
            if name not in known:
                raise ConfigError(
                    f"the arm {arm} of the study {self.name}: {key} names {name}, which this arm does not evaluate. "
                    f"{did_you_mean(name, known)}Its evaluations: {', '.join(known)}."
                )
        return config


def run_name(arm: str, seed: int) -> str:
    """The name of a run and of its folder."""
    return f"{arm}-seed{seed}"


def same_warm_start(one: RunConfig, other: RunConfig) -> bool:
    """Whether two configurations have a warm start, and the same one; who writes in GRPO does not matter to it."""
    left_out: dict[str, Any] = {**dict.fromkeys(NOT_USED, True), "rollout": {"condense": {"writer"}}}
    used, also_used = (config.model_dump(mode="json", exclude=left_out) for config in (one, other))
    return one.warm_start.steps > 0 and used == also_used


def find_study(name: str) -> Path:
    """The file that a command's STUDY argument means: a path, or the name of a shipped study."""
    path = Path(name)
    if path.is_file():
        return path
    stem = path.name.removesuffix(".yaml")
    known = {each.stem: each for each in sorted(STUDIES.glob("*.yaml"))}
    if path.parent in (Path(), Path("studies")) and stem in known:
        return known[stem]
    raise ConfigError(
        f"reading the study {name}: there is no such file. {did_you_mean(stem, known)}Shipped: {', '.join(known)}."
    )


def load_study(path: Path) -> Study:
    """The study of a file, its ``config`` found: beside the study file, else as a CONFIG argument."""
    study = parse(Study, read_yaml(path), source=f"the study {path}")
    beside = path.parent / study.config
    return study.model_copy(update={"config": str(beside if beside.is_file() else find_config(study.config))})
