"""Trajectories made by hand, for any test: `from builders import ledger_episode, scored`.

The words of an episode have ids from one small vocabulary, so that prompts continue each other (or do not) for real and
a tokenizer file can be written for them.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

from condensegrpo.core.messages import Message
from condensegrpo.core.scored_trajectory import ScoredTrajectory
from condensegrpo.core.trajectory import Condensation, Score, Span, SpanStatus, StopReason, Trajectory, Turn
from condensegrpo.storage.trajectories import (
    Provenance,
    provenance_of,
    read_figures,
    read_trajectories,
    write_trajectories,
)

WORDS = (
    "<s>", "<end>", "<user>", "<assistant>", "<tool>", "start", "keep", "a", "note", "report", "done",
    "<note>", "</note>", "<answer>", "</answer>", "+1", "+2", "+3", "-1", "-2", "-3",
    *"0123456789", "the", "value", "was", "and", "then", "so", "it", "is", "now",
)  # fmt: skip
IDS = {word: index for index, word in enumerate(WORDS)}


def user(text: str) -> Message:
    return Message(role="user", content=text)


def assistant(text: str) -> Message:
    return Message(role="assistant", content=text)


def ids(text: str) -> tuple[int, ...]:
    return tuple(IDS[word] for word in text.split())


def rendered(messages: Sequence[Message]) -> tuple[int, ...]:
    """The prompt of some messages by a toy chat template: ``<s> <role> words <end> … <assistant>``."""
    body = [IDS["<s>"]]
    for message in messages:
        body += [IDS[f"<{message.role}>"], *ids(message.content), IDS["<end>"]]
    return (*body, IDS["<assistant>"])


def turn(
    prompt_ids: Sequence[int],
    output_ids: Sequence[int],
    *,
    logprobs: Sequence[float] | None = None,
    condensation: Condensation | None = None,
    context: Sequence[Message] = (),
    reply: str = "ok",
    observations: Sequence[Message] = (),
) -> Turn:
    return Turn(
        prompt_ids=tuple(prompt_ids),
        output_ids=tuple(output_ids),
        logprobs=tuple(logprobs) if logprobs is not None else (-0.5,) * len(output_ids),
        policy_version=0,
        condensation=condensation,
        context=tuple(context),
        reply=assistant(reply),
        observations=tuple(observations),
    )


def condensation(
    statuses: str, tokens: Sequence[int], *, before: int, after: int, condenser: str = "last_k"
) -> Condensation:
    """``statuses`` has one letter a unit: k kept, d dropped, r rewritten; a span each."""
    letters = {"k": SpanStatus.KEPT, "d": SpanStatus.DROPPED, "r": SpanStatus.REWRITTEN}
    return Condensation(
        condenser=condenser,
        reason="every turn",
        tokens_before=before,
        tokens_after=after,
        spans=tuple(
            Span(first=index, last=index, units=1, status=letters[letter], tokens=count)
            for index, (letter, count) in enumerate(zip(statuses, tokens, strict=True))
        ),
    )


def trajectory(
    *turns: Turn,
    id: str = "p0/0",  # noqa: A002  the field's name
    group: str = "p0",
    stop: StopReason = StopReason.ANSWERED,
    answer: str | None = "7",
    sample: int = 0,
) -> Trajectory:
    return Trajectory(
        id=id, problem_id=group, group_id=group, sample=sample, turns=turns, stop=stop, answer=answer, seconds=0.25
    )


def scored(
    one: Trajectory,
    total: float,
    *,
    correct: float = 1.0,
    components: Mapping[str, float] | None = None,
    turn_rewards: Sequence[float] = (),
) -> ScoredTrajectory:
    return ScoredTrajectory.of(
        one,
        Score(
            total=total,
            components=components if components is not None else {"correct": correct},
            format_valid=True,
            correct=correct,
            context_tokens=one.max_context_tokens,
            turn_rewards=tuple(turn_rewards),
        ),
    )


def ledger_episode(
    replies: Sequence[str],
    operations: Sequence[str],
    *,
    keep_last: int | None = None,
    id: str = "ledger-3/0",  # noqa: A002  the field's name
    group: str = "ledger-3",
    stop: StopReason = StopReason.ANSWERED,
    answer: str | None = "7",
    sample: int = 0,
) -> Trajectory:
    """An episode as the engine records it: reply t is answered by operation t; with ``keep_last`` only the newest
    units stay in the prompt, else every prompt continues the last one.
    """
    pinned = (user("start 3 keep a note"),)
    units: list[tuple[Message, ...]] = []
    turns = []
    for index, reply in enumerate(replies):
        kept = units if keep_last is None else units[max(0, len(units) - keep_last) :]
        whole, shown = ((*pinned, *(message for unit in some for message in unit)) for some in (units, kept))
        declared = None
        if len(kept) < len(units):
            sizes = [sum(len(message.content.split()) + 2 for message in unit) for unit in units]
            statuses = "d" * (len(units) - len(kept)) + "k" * len(kept)
            declared = condensation(statuses, sizes, before=len(rendered(whole)), after=len(rendered(shown)))
        observations = (user(operations[index]),) if index < len(operations) else ()
        turns.append(
            turn(
                rendered(shown),
                (*ids(reply), IDS["<end>"]),
                condensation=declared,
                context=shown,
                reply=reply,
                observations=observations,
            )
        )
        units.append((assistant(reply), *observations))
    return trajectory(*turns, id=id, group=group, stop=stop, answer=answer, sample=sample)


def write_tokenizer(folder: Path) -> Path:
    """A tokenizer.json for ``WORDS``."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = Tokenizer(models.WordLevel(vocab=IDS, unk_token="<s>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    path = folder / "tokenizer.json"
    tokenizer.save(str(path))
    return path


def add_trajectory(path: Path, one: ScoredTrajectory, provenance: Provenance | None = None) -> None:
    """Write a file again with one more trajectory."""
    before = read_trajectories(path) if path.is_file() else ()
    known = provenance or (provenance_of(read_figures(path)) if before else None)
    write_trajectories(path, [*before, one], known)
