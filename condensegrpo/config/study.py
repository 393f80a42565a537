"""Study files: arms × seeds of ordinary runs. ``load_study`` reads one; ``Study.config_of`` gives a configuration."""

from importlib.resources import files
from pathlib import Path
from typing import Annotated

from pydantic import Field, model_validator

from condensegrpo.config.load import HELD_OUT, find_config, load_config
from condensegrpo.config.schema import Name, RunConfig
from condensegrpo.config.yaml_tree import Section, override, parse, read_yaml
from condensegrpo.core.errors import ConfigError
from condensegrpo.core.wording import did_you_mean

STUDIES = Path(str(files("condensegrpo.configs"))).with_name("studies")  # that are shipped


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
    """Every arm has a run of each; intervals need at least two, and mean something from five on."""
    overrides: list[str] = []
    """key=value overrides of every arm."""
    arms: dict[Name, list[str]] = Field(min_length=1)
    """Name of an arm → its key=value overrides."""
    report: StudyReport = StudyReport()
    hours: float | None = Field(default=None, gt=0)
    """Hours after which a sweep starts no further run; calling it again continues. null: no limit."""

    @model_validator(mode="after")
    def _names_fit(self) -> "Study":
        if len(set(self.seeds)) < len(self.seeds):
            raise ValueError(f"seeds: {self.seeds} has a seed twice; its runs would be equal")
        if self.report.baseline is not None and self.report.baseline not in self.arms:
            raise ValueError(
                f"report.baseline: there is no arm {self.report.baseline!r}. "
                f"{did_you_mean(self.report.baseline, tuple(self.arms))}Arms: {', '.join(self.arms)}"
            )
        return self

    @property
    def baseline(self) -> str:
        """The arm that the others are compared with."""
        return self.report.baseline or next(iter(self.arms))

    def run_arguments(self, arm: str, seed: int, out: Path) -> tuple[str, ...]:
        """The arguments of ``condensegrpo train`` for one run; its folder is ``out/ARM-seedN``."""
        identity = (f"seed={seed}", f"name={run_name(arm, seed)}", override("runs_dir", str(out)))
        return (self.config, *self.overrides, *self.arms[arm], *identity)

    def config_of(self, arm: str, seed: int, out: Path) -> RunConfig:
        """The configuration of one run.

        Raises:
            ConfigError: an override is not valid, or ``report.evaluations`` names none of this arm's.
        """
        path, *overrides = self.run_arguments(arm, seed, out)
        try:
            config = load_config(Path(path), overrides)
        except ConfigError as error:
            raise ConfigError(f"the arm {arm} of the study {self.name}: {error}") from error
        known = (HELD_OUT, *config.evaluate.variants)
        if missing := [name for name in self.report.evaluations or () if name not in known]:
            raise ConfigError(
                f"the arm {arm} of the study {self.name}: report.evaluations names {missing[0]}, which this arm does "
                f"not evaluate. {did_you_mean(missing[0], known)}Its evaluations: {', '.join(known)}."
            )
        return config


def run_name(arm: str, seed: int) -> str:
    """The name of a run and of its folder."""
    return f"{arm}-seed{seed}"


def find_study(name: str) -> Path:
    """The file that a command's STUDY argument means: a path, or the name of a shipped study.

    Raises:
        ConfigError: there is neither.
    """
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
    """The study of a file, its ``config`` found: beside the study file, else as a CONFIG argument.

    Raises:
        ConfigError: no such file, not YAML, an unknown key (with its nearest match), a wrong type or range.
    """
    study = parse(Study, read_yaml(path), source=f"the study {path}")
    beside = path.parent / study.config
    return study.model_copy(update={"config": str(beside if beside.is_file() else find_config(study.config))})
