"""The configuration of a resumed run, what it changes, and the record of every change in the run's folder.

configurations.jsonl    {"first_step": 0, "config": {…}}     the configuration of step 0, the first evaluation
                        {"first_step": 21, "config": {…}}    resumed after step 20 with other settings
"""

import json
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from condensegrpo.config.load import load_config, validate
from condensegrpo.config.schema import RunConfig
from condensegrpo.config.yaml_tree import dump, is_within
from condensegrpo.core.errors import ConfigError
from condensegrpo.core.shared_sequence import common_prefix
from condensegrpo.storage.files import read_lines, write_atomically
from condensegrpo.storage.run_folder import RunFolder

# Sections and keys that a resume cannot change: the folder has its name, and the policy before step 1 is made.
FIXED = ("name", "runs_dir", "seed", "model", "warm_start")
# Those that change what is learned: which trajectories a step has, what they are worth, and how the weights move.
LEARNED = (
    "task",
    "condenser",
    "reward",
    "sampler",
    "rollout",
    "sandbox.limits",
    "sandbox.packages",
    "algorithm",
    "learner.optimiser",
    "train.problems_per_step",
    "train.samples_per_problem",
)
UNSET = "not set"  # in place of the value of a key that only one of two configurations has
# Of these, what changes no trajectory.
NOT_LEARNED = ("rollout.workers", "sampler.options.urls", "sampler.options.urls_file")
LONGEST_VALUE = 60  # characters of a value in a table


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """A key that a resume changed."""

    first_step: int  # that has the new value
    key: str
    old: object
    new: object

    @property
    def learned(self) -> bool:
        """Whether it changes what is learned."""
        return _within(self.key, LEARNED) and not _within(self.key, NOT_LEARNED)

    def __str__(self) -> str:
        """``key: old → new``."""
        old, new = self.values
        return f"{self.key}: {old} → {new}"

    @property
    def values(self) -> tuple[str, str]:
        """The old and the new value as text; long ones from shortly before the place in which they differ."""
        old, new = (
            value if value == UNSET else json.dumps(value, ensure_ascii=False) for value in (self.old, self.new)
        )
        begin = max(common_prefix(old, new) - LONGEST_VALUE // 2, 0) if max(len(old), len(new)) > LONGEST_VALUE else 0
        return _short(old, begin), _short(new, begin)


def allowed_changes(folder: RunFolder, after: RunConfig, *, allow_changes: bool) -> tuple[Change, ...]:
    """The changes of a configuration since a run was last started."""
    changes = changes_between(config_at(folder, sys.maxsize), after)
    if (Path(after.runs_dir) / after.name).resolve() == folder.path.resolve():  # where it is, however it came there
        changes = tuple(change for change in changes if change.key != "runs_dir")
    fixed = ", ".join(change.key for change in changes if _within(change.key, FIXED))
    learned = ", ".join(change.key for change in changes if change.learned)
    if fixed:
        reason = (
            f"{fixed} cannot change any more: the folder has its name, and the policy before step 1 is made. Leave "
            f"that unchanged, or start a new run."
        )
    elif learned and not allow_changes:
        reason = (
            f"{learned} would change what is learned. Add --allow-changes to continue with the new values (the report "
            f"marks the step), leave out the change, or start a new run."
        )
    else:
        return changes
    raise ConfigError(
        f"resuming {folder.path}: the configuration differs from that of the run\n{change_table(changes)}\n{reason}"
    )


def store_configuration(folder: RunFolder, config: RunConfig, *, first_step: int) -> None:
    """Write ``config.yaml``, and record that it is the configuration from a step on; later records are removed."""
    tree = config.model_dump(mode="json")
    kept = [(step, before) for step, before in _records(folder) if step < first_step]
    if not kept or kept[-1][1] != tree:
        kept.append((first_step, tree))
    lines = (json.dumps({"first_step": step, "config": each}) for step, each in kept)
    write_atomically(folder.configurations, "".join(f"{line}\n" for line in lines))
    write_atomically(folder.config, dump(tree))


def learned_otherwise(folder: RunFolder, config: RunConfig) -> bool:
    """Whether a configuration changes what is learned compared with the last record; False without any."""
    history = _history(folder)
    return bool(history) and any(change.learned for change in changes_between(history[-1][1], config))


def recorded_changes(folder: RunFolder) -> tuple[Change, ...]:
    """The changes by all resumes of a run, in order."""
    pairs = pairwise(_history(folder))
    return tuple(change for (_, old), (step, new) in pairs for change in changes_between(old, new, first_step=step))


def config_at(folder: RunFolder, step: int) -> RunConfig:
    """The configuration under which a run took a step."""
    configs = [config for first, config in _history(folder) if first <= step]
    return configs[-1] if configs else load_config(folder.config)


def change_table(changes: Iterable[Change]) -> str:
    """A line for each change, of which there is at least one, in columns."""
    rows = [(change.key, *change.values, "changes what is learned" if change.learned else "") for change in changes]
    key, old, new, _ = (max(map(len, column)) for column in zip(*rows, strict=True))
    return "\n".join(f"  {row[0]:{key}}  {row[1]:>{old}} → {row[2]:{new}}  {row[3]}".rstrip() for row in rows)


def _history(folder: RunFolder) -> list[tuple[int, RunConfig]]:
    """The recorded configurations with their first steps; none before the run has begun."""
    return [(step, validate(tree, source=str(folder.configurations))) for step, tree in _records(folder)]


def _records(folder: RunFolder) -> list[tuple[int, Any]]:
    """The recorded configurations as they stand in the file."""
    if not folder.configurations.is_file():
        return []
    return [(line["first_step"], line["config"]) for line in read_lines(folder.configurations)]


def changes_between(before: RunConfig, after: RunConfig, *, first_step: int = 0) -> tuple[Change, ...]:
    """The keys in which two configurations differ."""
    leaves = differences(before.model_dump(mode="json"), after.model_dump(mode="json"))
    return tuple(Change(first_step=first_step, key=key, old=old, new=new) for key, (old, new) in leaves.items())


def _within(key: str, sections: Iterable[str]) -> bool:
    return any(is_within(key, section) for section in sections)


def _short(text: str, begin: int) -> str:
    text = f"…{text[begin:]}" if begin else text
    return text if len(text) <= LONGEST_VALUE else f"{text[: LONGEST_VALUE - 1]}…"


def differences(before: object, after: object, key: str = "") -> dict[str, tuple[object, object]]:
    """The leaves in which two YAML trees differ, by their dotted keys.

    {a: {b: 1, c: 2}} and {a: {b: 1, c: 3}}   ─▶   a.c: (2, 3)
    {a: [{b: 1}, {b: 2}]} and {a: [{b: 1}, {b: 3}]}   ─▶   a.1.b: (2, 3); lists of other lengths are one leaf
    """
    if isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        before, after = ({str(index): item for index, item in enumerate(items)} for items in (before, after))
    if not (isinstance(before, dict) and isinstance(after, dict)):
        return {} if before == after else {key: (before, after)}
    found = dict[str, tuple[object, object]]()
    for part in {**before, **after}:
        pair = before.get(part, UNSET), after.get(part, UNSET)
        found |= differences(*pair, f"{key}.{part}" if key else part)
    return found
