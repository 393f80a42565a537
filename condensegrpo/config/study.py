"""Study files: arms × seeds of ordinary runs. ``load_study`` reads one; ``Study.config_of`` gives a configuration."""

from collections.abc import Iterable
from importlib.resources import files
from itertools import chain
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import Field, model_validator

from condensegrpo.config.load import LISTED, find_config, load_config
from condensegrpo.config.schema import Name, RunConfig
from condensegrpo.config.section import Section, parse
from condensegrpo.config.yaml_tree import key_of, override, read_yaml
from condensegrpo.core.errors import ConfigError
from condensegrpo.core.wording import did_you_mean

# The initial policy does not depend on these; a difference in any other section means another warm start. The condenser
# and its trigger are not among them: an expert plays under both.
NOT_USED = frozenset({"name", "runs_dir", "reward", "algorithm", "train", "evaluate", "trackers", "sandbox"})
S = TypeVar("S", bound="Study")
STUDIES = Path(str(files("condensegrpo.configs"))).with_name("studies")  # that are shipped


class Study(Section):
    """Arms × seeds of ordinary runs of one configuration.

    ``predictions``, ``pilots`` and ``report`` are for ``condensegrpo.studies.lab``, which has their keys.
    """

    name: Name
    """Name of the folder of the study, below ``runs``."""
    question: str | None = None
    """What the study answers; the results begin with it."""
    config: str
    """Base of every run: a YAML file beside the study file, or as the CONFIG of ``condensegrpo train``."""
    seeds: list[Annotated[int, Field(ge=0)]] = Field(min_length=1)
    """Every arm has a run of each; at least ten for a claim: fewer are noted in the results."""
    overrides: list[str] = []
    """key=value overrides of every arm, in which ``{seed}`` is the seed of the run."""
    arms: dict[Name, list[str]] = Field(min_length=1)
    """Name of an arm → its key=value overrides."""
    hours: float | None = Field(default=None, gt=0)
    """Hours after which a sweep starts no further run; calling it again continues. null: no limit."""
    predictions: Any = None
    pilots: Any = None
    report: Any = None

    @model_validator(mode="after")
    def _runs_differ(self) -> "Study":
        if len(set(self.seeds)) < len(self.seeds):
            raise ValueError(f"seeds: {self.seeds} has a seed twice; its runs would be equal")
        check_overrides(chain(self.overrides, *self.arms.values()))
        return self

    def run_arguments(self, arm: str, seed: int, out: Path) -> tuple[str, ...]:
        """The arguments of ``condensegrpo train`` for one run; its folder is ``out/ARM-seedN``."""
        identity = (f"seed={seed}", f"name={run_name(arm, seed)}", override("runs_dir", str(out)))
        changes = (each.replace("{seed}", str(seed)) for each in (*self.overrides, *self.arms[arm]))
        return (self.config, *changes, *identity)

    def config_of(self, arm: str, seed: int, out: Path) -> RunConfig:
        """The configuration of one run."""
        path, *overrides = self.run_arguments(arm, seed, out)
        try:
            return load_config(Path(path), overrides)
        except ConfigError as error:
            raise ConfigError(f"the arm {arm} of the study {self.name}: {error}") from error


def check_overrides(overrides: Iterable[str]) -> None:
    """Raise a ValueError for an override of what differs between the runs of a study."""
    for change in overrides:
        if key_of(change) in ("seed", "name", "runs_dir"):
            raise ValueError(
                f"the override {change} would be lost: every run has its seed from seeds, and its own folder"
            )


def run_name(arm: str, seed: int) -> str:
    """The name of a run and of its folder."""
    return f"{arm}-seed{seed}"


def same_warm_start(one: RunConfig, other: RunConfig) -> bool:
    """Whether two configurations have a warm start, and the same one; who writes in GRPO does not matter to it."""
    left_out: dict[str, Any] = {**dict.fromkeys(NOT_USED, True), "rollout": {"condense": {"writer"}}}
    used, also_used = (config.model_dump(mode="json", exclude=left_out) for config in (one, other))
    return one.warm_start.steps > 0 and used == also_used


def shipped_studies() -> dict[str, Path]:
    """The studies in the package by name."""
    return {file.stem: file for file in sorted(STUDIES.glob("*.yaml"))}


def find_study(name: str) -> Path:
    """The file that a command's STUDY argument means: a path, or the name of a shipped study."""
    path = Path(name)
    if path.is_file():
        return path
    stem = path.name.removesuffix(".yaml")
    known = shipped_studies()
    if path.parent in (Path(), Path("studies")) and stem in known:
        return known[stem]
    raise ConfigError(f"reading the study {name}: there is no such file. {did_you_mean(stem, known, most=3)}{LISTED}")


def load_study(path: Path, kind: type[S] = Study) -> S:  # type: ignore[assignment]  # the default of a type variable
    """The study of a file, its ``config`` found: beside the study file, else as a CONFIG argument."""
    study = parse(kind, read_yaml(path), source=f"the study {path}")
    beside = path.parent / study.config
    return study.model_copy(update={"config": str(beside if beside.is_file() else find_config(study.config))})
