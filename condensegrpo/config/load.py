"""From a YAML file and ``key=value`` overrides to a configuration, and back to YAML."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from condensegrpo.config.extends import OVERRIDE, layered, shipped_file, shipped_files, shipped_name, sourced
from condensegrpo.config.extends import origins as origins_of
from condensegrpo.config.located import SHIPPED, absolute_paths
from condensegrpo.config.schema import RunConfig
from condensegrpo.config.yaml_tree import KeyPath, apply_overrides, dump, dump_commented, parse
from condensegrpo.core.errors import ConfigError
from condensegrpo.core.wording import did_you_mean

HELD_OUT = "held-out"  # the evaluation on a configuration's own problems
STORED = "config.yaml"  # the configuration in a run folder
BFLOAT16_CAP = 2.0  # of algorithm.importance, unless it is set: the bound that truncated importance sampling uses


def load_config(path: Path, overrides: Sequence[str] = ()) -> RunConfig:
    """The configuration of a YAML file and the files that it extends, with ``key=value`` overrides on top.

    A value is read as YAML: ``train.steps=20``, ``rollout.tools.use=[calculator]``, ``model.new=null``. Paths that are
    relative to another folder are absolute in it, see ``located.py``.
    """
    tree = absolute_paths(_with_origins(layered(path), overrides), path)
    return validate(tree, source=str(path), overrides=overrides)


def _with_origins(tree: Mapping[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    return apply_overrides(tree, overrides, wrap=lambda value: sourced(value, OVERRIDE))


def vary(config: RunConfig, overrides: Sequence[str]) -> RunConfig:
    """A configuration with some ``key=value`` overrides."""
    return validate(apply_overrides(config.model_dump(mode="json"), overrides), source=f"overrides {list(overrides)}")


def evaluations(config: RunConfig) -> dict[str, RunConfig]:
    """What a configuration evaluates on: ``held-out``, its own problems, then each of ``evaluate.variants``."""
    return {HELD_OUT: config, **{name: vary(config, overrides) for name, overrides in config.evaluate.variants.items()}}


def longest_request(config: RunConfig) -> int:
    """The most tokens that a prompt and its reply make, in training and in every evaluation."""
    return max(varied.rollout.limits.turn_tokens for varied in evaluations(config).values())


def dump_config(config: RunConfig) -> str:
    """The resolved configuration as YAML; ``load_config`` reads it back to an equal value."""
    return dump(config.model_dump(mode="json"))


def dump_with_origins(config: RunConfig, path: Path, overrides: Sequence[str] = ()) -> str:
    """``dump_config`` with the origin of every value as a comment: a file, an override, or the default.

    ``path`` and ``overrides`` are those that gave the configuration.
    """
    origins = dict(origins_of(_with_origins(layered(path), overrides)))
    names = Counter(Path(origin).name for origin in set(origins.values()))

    def comment(key_path: KeyPath) -> str:
        origin = origins.get(key_path, "default")
        name = Path(origin).name
        return origin if names[name] > 1 else name  # the whole path where two files have the same name

    return dump_commented(config.model_dump(mode="json"), comment)


def shipped() -> tuple[str, ...]:
    """The names of the configurations in the package, without ``.yaml`` and without those that are only extended."""
    return tuple(shipped_name(path) for path in shipped_files() if not path.stem.endswith("base"))


def named_config(name: str, overrides: Sequence[str] = ()) -> RunConfig:
    """The configuration that a CONFIG argument means: a YAML file, the name of a shipped one, or a run folder."""
    stored = Path(name) / STORED
    return load_config(stored if stored.is_file() else find_config(name), overrides)


def config_on(device: Literal["cpu", "gpu"], name: str, overrides: Sequence[str] = ()) -> RunConfig:
    """The configuration that a CONFIG argument means on a machine with such a device.

    A dtype that is not set is that device's, and so is what follows from it, such as ``algorithm.importance.cap``.
    """
    config = named_config(name, overrides)
    if "dtype" in config.model.model_fields_set:
        return config
    return named_config(name, (*overrides, f"model.dtype={'bfloat16' if device == 'gpu' else 'float32'}"))


def find_config(name: str) -> Path:
    """The file that a command's CONFIG argument means: a path, or the name of a shipped configuration.

    ``configs/quickstart.yaml`` works from an installed wheel as it does in a checkout, and so do ``methods/mem1`` and
    ``studies/configs/memory.yaml``.
    """
    path = Path(name)
    if path.is_file():
        return path
    if (path / STORED).is_file():
        raise ConfigError(
            f"reading the configuration {name}: it is the folder of a run. Continue that run with --resume {name}, or "
            f"start a new one from {path / STORED}."
        )
    shipped_as = path.as_posix().removeprefix("configs/")
    if inside := shipped_file(shipped_as):
        return inside
    if path.parts[:1] == ("studies",) and (SHIPPED / path).is_file():
        return SHIPPED / path
    fault = f"it is a folder without {STORED}, so not that of a run" if path.is_dir() else "there is no such file"
    raise ConfigError(
        f"reading the configuration {name}: {fault}. "
        f"{did_you_mean(shipped_as.removesuffix('.yaml'), shipped())}"
        f"Shipped: {', '.join(shipped())}."
    )


def validate(tree: Mapping[str, Any], *, source: str, overrides: Sequence[str] = ()) -> RunConfig:
    """The checked configuration of a tree, of which some values are those of ``overrides``."""
    return _with_importance(parse(RunConfig, tree, source=f"the configuration {source}", overrides=overrides))


def _with_importance(config: RunConfig) -> RunConfig:
    """A configuration whose importance correction is set, by default by the precision of sampler and learner.

    In bfloat16 two programs that compute one model differ by some hundredths of a nat a token; in fp32 by 1e-6.
    """
    algorithm = config.algorithm
    if algorithm.importance.cap is not None:
        return config
    rounds = "bfloat16" in (config.model.dtype, config.sampler.options.get("dtype"))
    importance = replace(algorithm.importance, cap=BFLOAT16_CAP if rounds else 0.0)
    return config.model_copy(update={"algorithm": algorithm.model_copy(update={"importance": importance})})
