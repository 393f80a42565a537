"""From a YAML file and ``key=value`` overrides to a configuration, and back to YAML."""

from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from condensegrpo.config.renames import converted, refuse_renamed
from condensegrpo.config.schema import RunConfig
from condensegrpo.config.yaml_tree import apply_overrides, dump, parse, read_yaml
from condensegrpo.core.errors import ConfigError
from condensegrpo.core.suggestions import did_you_mean

HELD_OUT = "held-out"  # the evaluation on a configuration's own problems


def load_config(path: Path, overrides: Sequence[str] = ()) -> RunConfig:
    """The configuration of a YAML file with ``key=value`` overrides on top.

    A value is read as YAML: ``train.steps=20``, ``rollout.tools.use=[calculator]``, ``model.new=null``.

    Raises:
        ConfigError: no such file, not YAML, an unknown key (with its nearest match), a wrong type or range.
    """
    tree = read_yaml(path)
    refuse_renamed(tree, f"the configuration {path}")
    return validate(apply_overrides(tree, overrides), source=str(path))


def load_stored(path: Path, overrides: Sequence[str] = ()) -> RunConfig:
    """The configuration that a run stored, perhaps under old names of keys; otherwise as ``load_config``."""
    return validate(apply_overrides(converted(read_yaml(path)), overrides), source=str(path))


def vary(config: RunConfig, overrides: Sequence[str]) -> RunConfig:
    """A configuration with some ``key=value`` overrides."""
    return validate(apply_overrides(config.model_dump(mode="json"), overrides), source=f"overrides {list(overrides)}")


def evaluations(config: RunConfig) -> dict[str, RunConfig]:
    """What a configuration evaluates on: ``held-out``, its own problems, then each of ``evaluate.variants``."""
    return {HELD_OUT: config, **{name: vary(config, overrides) for name, overrides in config.evaluate.variants.items()}}


def longest_request(config: RunConfig) -> int:
    """The most tokens that a prompt and its reply make, in training and in every evaluation."""
    limits = [varied.rollout.limits for varied in evaluations(config).values()]
    return max(each.max_context_tokens + each.max_output_tokens for each in limits)


def dump_config(config: RunConfig) -> str:
    """The resolved configuration as YAML; ``load_config`` reads it back to an equal value."""
    return dump(config.model_dump(mode="json"))


def shipped() -> tuple[str, ...]:
    """The names of the configurations in the package, without ``.yaml``."""
    return tuple(
        sorted(entry.name[:-5] for entry in files("condensegrpo.configs").iterdir() if entry.name.endswith(".yaml"))
    )


def find_config(name: str) -> Path:
    """The file that a command's CONFIG argument means: a path, or the name of a shipped configuration.

    ``configs/quickstart.yaml`` works from an installed wheel as it does in a checkout.
    """
    path = Path(name)
    if path.is_file():
        return path
    stem = path.name.removesuffix(".yaml")  # a name may hold a dot of its own: qwen3_0.6b
    inside = Path(str(files("condensegrpo.configs"))) / f"{stem}.yaml"
    if path.parent in (Path(), Path("configs")) and inside.is_file():
        return inside
    raise ConfigError(
        f"reading the configuration {name}: there is no such file. {did_you_mean(stem, shipped())}"
        f"Shipped: {', '.join(shipped())}."
    )


def validate(tree: Mapping[str, Any], *, source: str) -> RunConfig:
    """The checked configuration of a tree.

    Raises:
        ConfigError: every fault on a line of its own: the key, the value found and the value wanted.
    """
    refuse_renamed(tree, f"the configuration {source}")
    return parse(RunConfig, tree, source=f"the configuration {source}")
