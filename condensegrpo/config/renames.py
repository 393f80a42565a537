"""Old names of configuration keys. User input with one is refused with the new name; a stored run is converted."""

import json
from collections.abc import Iterator, Mapping
from copy import deepcopy
from typing import Any

from condensegrpo.config.yaml_tree import load, put
from condensegrpo.core.errors import ConfigError

Tree = dict[str, Any]

RENAMED: Mapping[str, str] = {
    **{
        f"rollout.{key}": f"rollout.limits.{key}"
        for key in ("max_turns", "max_context_tokens", "max_output_tokens", "turn_seconds")
    },
    "rollout.condense": "rollout.condense.when",
    "rollout.condense_share": "rollout.condense.share",
    "rollout.condense_to": "rollout.condense.to",
    "rollout.condense_jitter": "rollout.condense.jitter",
    "rollout.tools": "rollout.tools.use",
    "rollout.tool_format": "rollout.tools.format",
    "rollout.max_tool_turns": "rollout.tools.max_turns",
    "rollout.tool_seconds": "rollout.tools.seconds",
    "rollout.tool_chars": "rollout.tools.max_chars",
    "algorithm.estimator": "algorithm.advantage.estimator",
    "algorithm.estimator_options": "algorithm.advantage.options",
    "algorithm.context_anchors": "algorithm.advantage.context_anchors",
    "algorithm.whiten": "algorithm.advantage.whiten",
    "algorithm.loss": "algorithm.loss.name",
    "algorithm.loss_options": "algorithm.loss.options",
    "algorithm.aggregation": "algorithm.aggregation.mode",
    "algorithm.aggregation_tokens": "algorithm.aggregation.max_tokens",
    "algorithm.summary_share": "algorithm.aggregation.summary_share",
    "algorithm.on_stop": "algorithm.stops.handling",
    "algorithm.stop_penalty": "algorithm.stops.penalty",
    "learner.offload": "learner.offload.training",
    "learner.offload_reference": "learner.offload.reference",
    "sandbox.rung": "sandbox.isolation",
    **{
        f"sandbox.{key}": f"sandbox.limits.{key}"
        for key in ("seconds", "memory_mib", "processes", "disk_mib", "files", "output_bytes")
    },
}
SUPPLIED = ("tool_format", "keep_last")  # options of a task that older configurations repeated


def refuse_renamed(tree: Mapping[str, Any], source: str) -> None:
    """Check that a tree has no old key.

    Raises:
        ConfigError: every old key with its new name.
    """
    lines = [f"  {old} is now {new}" for old, new in _renamed(tree)]
    if lines:
        raise ConfigError("\n".join([f"reading {source}:", *lines]))


def converted(tree: Mapping[str, Any]) -> Tree:
    """The tree of a stored run under the current names; a tree without old keys is only copied."""
    result: Tree = deepcopy(dict(tree))
    moves = [(new, _taken(result, old)) for old, new in list(_renamed(result))]
    for new, value in moves:
        put(result, new.split("."), value)
    match result:
        case {"evaluate": {"variants": dict(variants)}}:
            variants.update({name: list(map(_override, given)) for name, given in variants.items()})
    match result:
        case {"task": {"options": dict(options)}} if moves:
            for key in SUPPLIED:
                options.pop(key, None)
    return result


def _renamed(tree: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """The old keys in a tree with their new names. A key that is a section today is old unless it is a mapping."""
    for old, new in RENAMED.items():
        section, _, key = old.partition(".")
        branch = tree.get(section)
        if not isinstance(branch, Mapping) or key not in branch:
            continue
        if not (new.startswith(f"{old}.") and isinstance(branch[key], Mapping)):
            yield old, new
        elif old == "rollout.tools":
            yield from ((f"{old}.{entry}", f"{new}.{entry}") for entry in branch[key] if str(entry).isdigit())


def _taken(tree: Tree, key: str) -> Any:  # noqa: ANN401  a YAML value
    """Remove a dotted key from a tree and return its value."""
    *above, last = key.split(".")
    for part in above:
        tree = tree[part]
    return tree.pop(last)


def _override(text: str) -> str:
    """An override of a stored variant under the current names: rollout.max_turns=9 ─▶ rollout.limits.max_turns=9."""
    key, _, value = text.partition("=")
    tree: Tree = {}
    put(tree, key.split("."), load(value))
    for old, new in _renamed(tree):
        if key == old or key.startswith(f"{old}."):
            return f"{new}{key.removeprefix(old)}={value}"
    section = key.partition(".")[0]
    return f"{key}={json.dumps(converted(tree)[section])}" if key == section and any(_renamed(tree)) else text
