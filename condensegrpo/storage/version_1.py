"""Conversion of trajectory and credit lines of version 1, written before the fields below were renamed or added.

trajectory.id  7-a-3                                     ─▶   sample  3, of an id that ends otherwise 0
trajectory.turns[].condensation.spans[].fate             ─▶   status
trajectory.turns[].turn_rewards["tool_attempts"]  2.0    ─▶   tool_attempts   2    likewise tool_successes
"""

from collections.abc import Iterator


def converted_from_version_1(record: dict[str, object]) -> dict[str, object]:
    """The fields of a line of version 1 as version 2 names them; changes the parsed JSON in place.

    What is damaged stays so: the decoder names the fault.
    """
    trajectory = record.get("trajectory")
    if isinstance(trajectory, dict) and isinstance(trajectory.get("id"), str):
        number = trajectory["id"].rpartition("-")[2]
        trajectory["sample"] = int(number) if number.isdecimal() else 0
    for turn in _objects(trajectory, "turns"):
        for span in _objects(turn.get("condensation"), "spans"):
            if "fate" in span:
                span["status"] = span.pop("fate")
        rewards = turn.get("turn_rewards")
        for name in ("tool_attempts", "tool_successes"):
            if isinstance(rewards, dict) and isinstance(rewards.get(name), int | float):
                turn[name] = int(rewards.pop(name))
    return record


def _objects(value: object, key: str) -> Iterator[dict[str, object]]:
    """The JSON objects in the list under a key, if the value is an object and has such a list."""
    items = value.get(key) if isinstance(value, dict) else None
    yield from (item for item in items if isinstance(item, dict)) if isinstance(items, list) else ()
