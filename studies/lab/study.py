"""Study files with what the laboratory reads of them: predictions, pilots and the report."""

from pathlib import Path
from typing import Annotated

from pydantic import Field, model_validator

from condensegrpo.assembly.build import build
from condensegrpo.assembly.components import Components
from condensegrpo.assembly.held_out import evaluated_problems
from condensegrpo.config.load import HELD_OUT
from condensegrpo.config.schema import Name, RunConfig
from condensegrpo.config.section import Section
from condensegrpo.config.study import Study, check_overrides, load_study
from condensegrpo.config.yaml_tree import dump
from condensegrpo.core.errors import ConfigError, DataError
from condensegrpo.core.wording import did_you_mean
from condensegrpo.storage.files import make_folder, write_atomically

EFFECTS = ("writer_effect", "reader_effect")  # of cross-play
FIGURES = ("success", "context_tokens", "calls", "prompt_tokens", "prompt_tokens_uncached", "output_tokens", "price")


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
    prompt_tokens_uncached (with a prefix cache), writer_effect or reader_effect of cross-play, or one of
    report.metrics."""
    evaluation: str = HELD_OUT
    """Name of the evaluation."""
    minus_evaluation: str | None = None
    """Name of the evaluation of the subtracted figure; null: the same."""
    above: float | None = None
    """The claim holds if the whole interval lies above this, and fails if it lies below."""
    below: float | None = None
    """Likewise the other way round; one of the two is needed."""
    pilot_sd: float | None = Field(default=None, gt=0)
    """Standard deviation over seeds of the figure or contrast in a pilot, √(s² + s'²) of arms that are not paired:
    check says which effect the study finds. null: not known."""
    by_construction: bool = False
    """The figure cannot come out otherwise: the verdict is "by construction", unless it fails."""

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
    def sides(self) -> tuple[tuple[str, str], ...]:
        """The arms that it is about, each with its evaluation."""
        subtracted = [] if self.minus is None else [(self.minus, self.minus_evaluation or self.evaluation)]
        return ((self.arm, self.evaluation), *subtracted)

    @property
    def text(self) -> str:
        """``trained − 0.25 × full in context_tokens < 0``."""
        factor = "" if self.times == 1 else f"{self.times:g} × "
        second = "" if self.minus_evaluation is None else f" ({self.minus_evaluation})"
        contrast = self.arm if self.minus is None else f"{self.arm} − {factor}{self.minus}{second}"
        return f"{contrast} in {self.figure} {'>' if self.below is None else '<'} {self.threshold:g}"


class Pilots(Section):
    """Runs that settings are chosen with, see ``write_pilots``: other seeds, other held-out problems."""

    seeds: list[Annotated[int, Field(ge=0)]] = Field(min_length=1)
    """None of them may be a seed of the study."""
    overrides: list[str]
    """key=value overrides that give other held-out problems, such as evaluate.skip=256."""


class StudyReport(Section):
    """The evaluations, columns and baseline of the results."""

    evaluations: list[str] | None = None
    """Names of evaluations: held-out, and those of evaluate.variants; null: all that the arms share."""
    metrics: list[str] = []
    """Further columns: metrics of an evaluation, such as turns or tool_calls_valid, as means over seeds."""
    baseline: Name | None = None
    """The arm that every other arm is compared with; null: the first."""
    reach: float = Field(default=0.8, gt=0, le=1)
    """Held-out success whose first step the table shows, from the evaluations during training."""


class LabStudy(Study):
    """Arms × seeds of ordinary runs of one configuration, with predictions."""

    predictions: list[Prediction] = []
    """The results say which of them hold."""
    pilots: Pilots | None = None
    """null: none."""
    report: StudyReport = StudyReport()

    @model_validator(mode="after")
    def _claims_fit(self) -> "LabStudy":
        named = [("report.baseline", self.report.baseline)]
        named += [("predictions", arm) for each in self.predictions for arm, _ in each.sides]
        for key, arm in named:
            if arm is not None and arm not in self.arms:
                known = ", ".join(self.arms)
                raise ValueError(f"{key}: there is no arm {arm!r}. {did_you_mean(arm, tuple(self.arms))}Arms: {known}")
        figures = (*FIGURES, *EFFECTS, *self.report.metrics)
        if unknown := [each.figure for each in self.predictions if each.figure not in figures]:
            raise ValueError(
                f"predictions: the results have no figure {unknown[0]!r}. {did_you_mean(unknown[0], figures)}"
                f"Figures: {', '.join(figures)}; report.metrics adds others"
            )
        if self.pilots is not None:
            check_overrides(self.pilots.overrides)
            if both := sorted({*self.seeds} & {*self.pilots.seeds}):
                raise ValueError(
                    f"pilots.seeds: {both} are seeds of the study too, which would report what was tuned on"
                )
        return self

    @property
    def baseline(self) -> str:
        """The arm that the others are compared with."""
        return self.report.baseline or next(iter(self.arms))

    def pilot_study(self) -> "LabStudy":
        """The same arms with the seeds and problems of the pilots; it predicts nothing."""
        if self.pilots is None:
            raise ConfigError(f"choosing the pilots of the study {self.name}: it has none. Add pilots to its file.")
        overrides = [*self.overrides, *self.pilots.overrides]
        changes = {"name": f"{self.name}-pilots", "seeds": self.pilots.seeds, "overrides": overrides}
        return self.model_copy(update={**changes, "predictions": [], "pilots": None})

    def config_of(self, arm: str, seed: int, out: Path) -> RunConfig:
        """The configuration of one run."""
        config = super().config_of(arm, seed, out)
        known = (HELD_OUT, *config.evaluate.variants)
        named = [("report.evaluations", name) for name in self.report.evaluations or ()]
        named += [("predictions", name) for each in self.predictions for of, name in each.sides if of == arm]
        for key, name in named:
            if name not in known:
                raise ConfigError(
                    f"the arm {arm} of the study {self.name}: {key} names {name}, which this arm does not evaluate. "
                    f"{did_you_mean(name, known)}Its evaluations: {', '.join(known)}."
                )
        return config


def load_lab_study(path: Path) -> LabStudy:
    """The study of a file; raises as ``load_study``."""
    return load_study(path, LabStudy)


def write_pilots(study: LabStudy, out: Path | None = None) -> Path:
    """The study file of the pilots of a study, in a folder or by default in ``runs/NAME-pilots``."""
    pilots = study.pilot_study()
    folder = out or Path("runs") / pilots.name
    for arm in study.arms:
        first, pilot = (build(each.config_of(arm, each.seeds[0], folder)) for each in (study, pilots))
        check_fresh(first, pilot)
    make_folder(folder)
    found = pilots.model_copy(update={"config": str(Path(pilots.config).absolute())})
    write_atomically(folder / "study.yaml", dump(found.model_dump(mode="json", exclude_unset=True)))
    return folder / "study.yaml"


def check_fresh(components: Components, pilot: Components) -> None:
    """Compare the held-out problems of a study with those that its settings were chosen on, by content."""
    used, evaluated = evaluated_problems(pilot), evaluated_problems(components)
    if both := next((content for content in evaluated if content in used), None):
        raise DataError(
            f"checking the pilots: {evaluated[both]} of the study is {used[both]} of its pilots: "
            f"{both[0][:80]!r}. Give pilots.overrides other held-out problems, such as another evaluate.skip."
        )
