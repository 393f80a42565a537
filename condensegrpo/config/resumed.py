"""The configuration of a resumed run: its own, with the overrides that do not contradict what it has done so far."""

from collections.abc import Sequence
from pathlib import Path

from condensegrpo.config.load import load_stored
from condensegrpo.config.schema import RunConfig
from condensegrpo.core.errors import ConfigError

FIXED = ("name", "runs_dir", "seed", "model", "task", "warm_start")  # sections and keys that a resume cannot change


def resumed_config(path: Path, overrides: Sequence[str]) -> RunConfig:
    """The configuration of the run whose ``config.yaml`` is ``path``, with overrides.

    Raises:
        ConfigError: an override is not valid, or it changes a key in ``FIXED``.
    """
    before, after = load_stored(path), load_stored(path, overrides)
    changes = differences(before.model_dump(mode="json"), after.model_dump(mode="json"))
    for key, (old, new) in changes.items():
        if key.partition(".")[0] in FIXED:
            raise ConfigError(
                f"resuming {path.parent}: {key} was changed from {old!r} to {new!r}. The steps so far depend on it: "
                f"leave it unchanged, or start a new run."
            )
    return after


def differences(before: object, after: object, key: str = "") -> dict[str, tuple[object, object]]:
    """The leaves in which two YAML trees differ, by their dotted keys.

    {a: {b: 1, c: 2}} and {a: {b: 1, c: 3}}   ─▶   a.c: (2, 3)
    """
    if not (isinstance(before, dict) and isinstance(after, dict)):
        return {} if before == after else {key: (before, after)}
    return {
        name: pair
        for part in {**before, **after}
        for name, pair in differences(before.get(part), after.get(part), f"{key}.{part}" if key else part).items()
    }
