"""What a line holds of a trajectory: every message once, and of every prompt after the first what is new in it.

    messages   S Q R0 O0 R1                  in the order in which they came up
    turn 0     context [[0, 2]]   reply 2    observations [[3, 4]]   output_ids [7, 8]   prompt_ids [5, 6]
    turn 1     context [[0, 4]]   reply 4    observations []         output_ids [7]      added_ids [9]

A run ``[first, end]`` stands for the messages from ``first`` up to, not including, ``end``. Prompt 1 is prompt 0,
output 0 and what was added: 5 6 7 8 9. A prompt that was rewritten has ``copied_ids`` instead: its parts, which copy
prompt 0 and output 0, see ``copied_parts``. Each turn costs what is new in it, in a line and in what is read from it.
"""

from array import array
from collections.abc import Iterable, Sequence

from condensegrpo.core.messages import Message
from condensegrpo.core.shared_sequence import SharedSequence, packed_ids, shared_ids
from condensegrpo.core.trajectory import Trajectory
from condensegrpo.storage.codec import decode, fields_of

Run = list[int]
LEAST = 8  # consecutive ids that are worth a copy
BYTES = array("I").itemsize  # of an id
BETWEEN = 64  # matches of the same bytes that begin within an id, after which a copy is not looked for any further

CopiedPart = list[int]


class _Messages:
    """The messages of a line, and the runs that stand for some of them."""

    def __init__(self) -> None:
        self.all: list[Message] = []
        self._indices: dict[Message, int] = {}  # of the newest of equal messages
        self._same: dict[int, int] = {}  # by identity: a faster lookup

    def add(self, message: Message) -> int:
        """The index of a message that is new, though it may equal an earlier one."""
        self._indices[message] = self._same[id(message)] = len(self.all)
        self.all.append(message)
        return len(self.all) - 1

    def new_run(self, messages: Sequence[Message]) -> list[Run]:
        """The run of messages that are new."""
        indices = [self.add(message) for message in messages]
        return [[indices[0], indices[-1] + 1]] if indices else []

    def runs(self, messages: Sequence[Message], before: Iterable[Run] = ()) -> list[Run]:
        """The runs of some messages, as few as can be, behind those that are known."""
        runs = [list(run) for run in before]
        end = runs[-1][1] if runs else 0
        for message, known in zip(messages, map(self._same.get, map(id, messages)), strict=True):
            index = known
            if index != end and end < len(self.all) and self.all[end] is message:
                index = end  # it came up again
            elif index is None:
                index = self._indices.get(message, -1)
                index = self.add(message) if index < 0 else index
            if runs and index == end:
                runs[-1][1] += 1
            else:
                runs.append([index, index + 1])
            end = index + 1
        return runs


def stored(trajectory: Trajectory) -> dict[str, object]:
    """The JSON object of a trajectory."""
    messages, turns, last, context = _Messages(), list[dict[str, object]](), None, list[Run]()
    for turn in trajectory.turns:
        if last is not None and isinstance(turn.context, SharedSequence) and turn.context.continues(last.context):
            context = messages.runs(turn.context[len(last.context) :], before=context)
        else:
            context = messages.runs(turn.context)
        changed = {
            "context": context,
            "reply": messages.add(turn.reply),
            "observations": messages.new_run(turn.observations),
        }
        added = turn.added_ids(last) if last is not None else None
        if added is not None:
            ids: dict[str, object] = {"added_ids": added}
        elif last is not None:
            earlier = packed_ids(last.prompt_ids) + packed_ids(last.output_ids)
            ids = {"copied_ids": copied_parts(turn.prompt_ids, earlier)}
        else:
            ids = {"prompt_ids": tuple(turn.prompt_ids)}
        turns.append(ids | {name: value for name, value in fields_of(turn).items() if name != "prompt_ids"} | changed)
        last = turn
    return fields_of(trajectory) | {"messages": messages.all, "turns": turns}


def restore(trajectory: dict[str, object]) -> None:
    """Replace what ``stored`` changed by values of a ``Turn``, in parsed JSON; what else is damaged stays so."""
    if "messages" not in trajectory:
        raise ValueError("trajectory: Trajectory misses messages")
    messages = list(decode(tuple[Message, ...], trajectory.pop("messages"), "trajectory.messages"))
    prompt: SharedSequence[int] | None = None  # with its output
    turns = trajectory.get("turns")
    for index, turn in enumerate(turns if isinstance(turns, list) else ()):
        if isinstance(turn, dict):
            path = f"trajectory.turns[{index}]"
            _restore_messages(turn, messages, path)
            prompt = _restore_ids(turn, prompt, path)


def _restore_messages(turn: dict[str, object], messages: list[Message], path: str) -> None:
    if "context" in turn:
        runs = _runs(turn["context"], len(messages), f"{path}.context")
        whole = len(runs) == 1 and runs[0][0] == 0
        turn["context"] = SharedSequence(messages, runs[0][1]) if whole else SharedSequence(_chosen(messages, runs))
    if "observations" in turn:
        turn["observations"] = tuple(
            _chosen(messages, _runs(turn["observations"], len(messages), f"{path}.observations"))
        )
    if "reply" in turn:
        reply = decode(int, turn["reply"], f"{path}.reply")
        if not 0 <= reply < len(messages):
            raise ValueError(f"{path}.reply: wanted the place of one of {len(messages)} messages, found {reply}")
        turn["reply"] = messages[reply]


def _runs(value: object, size: int, path: str) -> tuple[tuple[int, ...], ...]:
    runs = decode(tuple[tuple[int, ...], ...], value, path)
    for run in runs:
        if len(run) != 2 or not 0 <= run[0] < run[1] <= size:
            raise ValueError(f"{path}: wanted runs [first, end] of {size} messages, found {list(run)}")
    return runs


def _chosen(messages: list[Message], runs: Iterable[Sequence[int]]) -> list[Message]:
    return [message for first, end in runs for message in messages[first:end]]


def _restore_ids(turn: dict[str, object], last: SharedSequence[int] | None, path: str) -> SharedSequence[int] | None:
    """Put the whole prompt into a turn; returns it with the turn's output."""
    key = next((key for key in ("added_ids", "copied_ids", "prompt_ids") if key in turn), None)
    if key is None:
        return None  # the decoder names what misses
    if key != "prompt_ids" and last is None:
        raise ValueError(f"{path}.{key}: there is no prompt before it")
    stored, before = turn.pop(key), last or shared_ids(())
    output = decode(tuple[int, ...], turn.get("output_ids", []), f"{path}.output_ids")
    try:
        if key == "copied_ids":
            parts = decode(tuple[tuple[int, ...], ...], stored, f"{path}.{key}")
            prompt = shared_ids(ids_of_parts(parts, before))
        else:
            ids = decode(tuple[int, ...], stored, f"{path}.{key}")
            prompt = before.extended(ids) if key == "added_ids" else shared_ids(ids)
        turn["prompt_ids"] = prompt
        return prompt.extended(output)
    except OverflowError as error:
        raise ValueError(f"{path}.{key}: wanted token ids, found a number that is none ({error})") from error


def copied_parts(ids: Sequence[int], earlier: Sequence[int]) -> list[CopiedPart]:
    """The parts that make up some ids: copies of earlier ids with new ones between them.

        earlier  5 6 7 8 9 10 11 12     ids  5 6 7 99 9 10 11 12     ─▶     [0, 3, 99] [4, 8]

    A part ``[first, end, new, …]`` stands for the earlier ids from ``first`` up to, not including, ``end``, and new
    ones after them.
    """
    packed, known = packed_ids(ids), packed_ids(earlier)
    target, source = packed.tobytes(), known.tobytes()
    result, done, at = [[0, 0]], 0, 0  # the first ``done`` ids have parts
    while at + LEAST <= len(packed):
        first = _index(target[at * BYTES : (at + LEAST) * BYTES], source, likely=result[-1][1])
        if first is None:
            at += LEAST
            continue
        while at > done and first > 0 and packed[at - 1] == known[first - 1]:
            at, first = at - 1, first - 1
        length = _common(target[at * BYTES :], source[first * BYTES :])
        result[-1] += packed[done:at]
        result.append([first, first + length])
        done = at = at + length
    result[-1] += packed[done:]
    return [part for part in result if part != [0, 0]]


def ids_of_parts(stored: Iterable[Sequence[int]], earlier: Sequence[int]) -> "array[int]":
    """The ids that parts stand for."""
    known, ids = packed_ids(earlier), array("I")
    for part in stored:
        if len(part) < 2 or not 0 <= part[0] <= part[1] <= len(known):
            raise ValueError(f"wanted parts [first, end, new, …] of {len(known)} earlier ids, found {part!r:.60}")
        ids += known[part[0] : part[1]]
        ids.extend(part[2:])
    return ids


def _index(ids: bytes, source: bytes, *, likely: int) -> int | None:
    """Where some ids are in the source: at the likely index if they are there; None if they are not."""
    if source.startswith(ids, likely * BYTES):
        return likely
    at = source.find(ids)
    for _ in range(BETWEEN):
        if at < 0 or not at % BYTES:
            break
        at = source.find(ids, at + 1)
    return None if at % BYTES else at // BYTES  # −1 is between ids, too


def _common(first: bytes, second: bytes) -> int:
    """With how many equal ids two sequences begin."""
    equal, most = 0, min(len(first), len(second)) // BYTES
    while equal < most:
        middle = (equal + most + 1) // 2
        if first[equal * BYTES : middle * BYTES] == second[equal * BYTES : middle * BYTES]:
            equal = middle
        else:
            most = middle - 1
    return equal
