"""Rows of training data for the trainers of others, as dictionaries of their own structures. Imports no torch.

    for row in export_rows("runs/quickstart", "trl"):
        row["prompt_ids"], row["completion_ids"], row["tool_mask"], row["advantages"], ...

A row is a segment: a maximal run of turns in which each prompt continues the last. A trajectory that was condensed has
several; training each as a row of its own trains every sampled token in the context that it was sampled in.

    to         structure                                   one for each
    trl        what ``GRPOTrainer`` computes its loss of    segment
    prime-rl   ``TrainingSample``                           segment
    verl       ``AgentLoopOutput``                          segment
    openenv    ``TrainingTrace``                            trajectory, with a turn for each call
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any, Literal, get_args

from condensegrpo.algorithms.segments import segments
from condensegrpo.core.errors import ConfigError, DataError
from condensegrpo.core.scored_trajectory import ScoredTrajectory
from condensegrpo.core.trajectory import Segment, Trajectory
from condensegrpo.core.wording import ranges
from condensegrpo.storage.run_folder import RunFolder
from condensegrpo.storage.trajectories import PART, Credit, provenance_of, read_credit, read_figures, read_trajectories

System = Literal["trl", "prime-rl", "verl", "openenv"]
Exported = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenRow:
    """A segment token by token; what concerns a token that nobody trains is 0."""

    scored: ScoredTrajectory
    number: int  # of the segment in its trajectory, from 0
    of: int  # segments of the trajectory
    prompt: int  # tokens before the first sampled one
    turns: int  # messages at its end
    token_ids: list[int]  # (L,)
    mask: list[int]  # (L,) 1 where a sampled token trains
    logprobs: list[float]  # (L,) nats, under the distribution sampled from
    advantages: list[float] | None  # (L,) None: no credit was given
    weights: list[float] | None  # (L,) of a token's loss in the optimiser step; likewise

    @property
    def origin(self) -> Exported:
        """Names and reward of its trajectory, which are equal for all its rows."""
        figures = self.scored.figures
        return {
            "trajectory": figures.id,
            "group": figures.group_id,
            "problem": figures.problem_id,
            "segment": self.number,
            "segments": self.of,
            "reward": figures.total,
        }


def export_rows(source: str | PathLike[str], to: System, *, step: int | None = None) -> Iterator[Exported]:
    """The rows of a run, or of a file of trajectories, for another trainer.

    Advantages and weights are those that the run trained with; trajectories of evaluations and of the proxy have
    none, and the trainer computes its own of ``reward`` and ``group``.

    Args:
        source: a run folder or a Parquet file of trajectories.
        step: of the run; None: all of its steps.

    Raises:
        DataError: a trajectory has pictures, whose pixels are no part of a row.
    """
    if to not in get_args(System):
        raise ConfigError(f"exporting rows of {source}: found to={to!r}, wanted {', '.join(get_args(System))}.")
    for file, credit_file in _files(Path(source), step):
        credit = read_credit(credit_file) if credit_file.is_file() else None
        provenance = provenance_of(read_figures(file))
        temperature = 1.0 if provenance is None else provenance.temperature
        yield from exported(read_trajectories(file), to, credit=credit, temperature=temperature)


def exported(
    scored: Sequence[ScoredTrajectory],
    to: System,
    *,
    credit: Mapping[str, Credit] | None = None,
    temperature: float = 1.0,
) -> Iterator[Exported]:
    """The rows of the trajectories of one step.

    Args:
        credit: of every trajectory by its id; None: none was given.
        temperature: that they were sampled with.
    """
    if to == "openenv":
        if seeing := [each for each in scored if each.figures.picture_tokens]:
            raise _has_pictures(seeing[0].trajectory)
        yield from (_openenv(each, None if credit is None else credit[each.trajectory.id]) for each in scored)
        return
    rows = [row for each in scored for row in token_rows(each, None if credit is None else credit[each.trajectory.id])]
    trained = sum(sum(row.mask) for row in rows)
    shapes: Mapping[str, Callable[[TokenRow], Exported]] = {
        "trl": _trl,
        "verl": _verl,
        "prime-rl": lambda row: _prime_rl(row, temperature, trained),
    }
    yield from map(shapes[to], rows)


def _has_pictures(trajectory: Trajectory) -> DataError:
    return DataError(
        f"exporting rows: the trajectory {trajectory.id} has pictures, and rows hold token ids alone. Export a run "
        f"without pictures, or train it here."
    )


def token_rows(scored: ScoredTrajectory, credit: Credit | None) -> Iterator[TokenRow]:
    """The rows of one trajectory in which a token trains."""
    trajectory = scored.trajectory
    weights = [float(not turn.frozen) for turn in trajectory.turns] if credit is None else credit.weights
    advantages = [0.0] * len(weights) if credit is None else credit.advantages
    made = segments(trajectory, advantage_K=advantages, weight_K=weights)
    for number, segment in enumerate(made):
        if segment.media:
            raise _has_pictures(trajectory)
        if any(turn.weight for turn in segment.turns):
            last = trajectory.turns[segment.turns[-1].turn]
            columns = {
                name: None if credit is None else _spread(segment, [getattr(turn, name) for turn in segment.turns], 0.0)
                for name in ("advantage", "weight")
            }
            yield TokenRow(
                scored=scored,
                number=number,
                of=len(made),
                prompt=segment.turns[0].start,
                turns=len(last.context) + 1,
                token_ids=list(segment.token_ids),
                mask=_spread(segment, [int(turn.weight > 0) for turn in segment.turns], 0),
                logprobs=_spread(segment, [turn.logprobs for turn in segment.turns], 0.0),
                advantages=columns["advantage"],
                weights=columns["weight"],
            )


def _spread(segment: Segment, values: Sequence[Any], beyond: float) -> list[Any]:
    """Values of the turns at their sampled tokens: one for all tokens of a turn, or one for each."""
    row = [beyond] * len(segment.token_ids)
    for turn, value in zip(segment.turns, values, strict=True):
        places = turn.positions
        row[places.start : places.stop] = value if isinstance(value, tuple) else [value] * len(places)
    return row


def _files(source: Path, step: int | None) -> Iterator[tuple[Path, Path]]:
    """Files of trajectories, each with that of its credit, which need not exist."""
    if not source.is_dir():
        if step is not None:
            raise ConfigError(f"exporting rows of {source}: found a step, and a file is one step. Leave it out.")
        yield source, source.parent.parent / "credit" / f"{source.stem.partition(PART)[0]}{source.suffix}"
        return
    run = RunFolder.open(source)
    if step is not None and step not in run.steps():
        raise ConfigError(
            f"exporting rows of {source}: there is no step {step}, the run has {ranges(run.steps()) or 'none'}."
        )
    for number in run.steps() if step is None else (step,):
        yield run.trajectories(number), run.credit(number)


def _trl(row: TokenRow) -> Exported:
    """Columns of ``GRPOTrainer``; ``condensegrpo.integrations.trl.inputs`` pads them."""
    start = row.prompt
    return {
        "prompt_ids": row.token_ids[:start],
        "completion_ids": row.token_ids[start:],
        "tool_mask": row.mask[start:],
        "old_per_token_logps": row.logprobs[start:],
        "advantages": None if row.advantages is None else row.advantages[start:],
        "weights": None if row.weights is None else row.weights[start:],
        **row.origin,
    }


def _prime_rl(row: TokenRow, temperature: float, trained: int) -> Exported:
    """Fields of ``TrainingSample``. It divides a sum by the trained tokens of the step, which the weights undo."""
    return {
        "token_ids": row.token_ids,
        "mask": [bool(trains) for trains in row.mask],
        "logprobs": row.logprobs,
        "temperatures": [temperature] * len(row.token_ids),
        "env_name": row.scored.figures.group_id,
        "rl_weights": None if row.weights is None else [weight * trained for weight in row.weights],
        "advantages": row.advantages,
    }


def _verl(row: TokenRow) -> Exported:
    """Fields of ``AgentLoopOutput``; ``extra_fields`` has what it has no field for."""
    start = row.prompt
    credit = {"advantages": row.advantages, "weights": row.weights}
    return {
        "prompt_ids": row.token_ids[:start],
        "response_ids": row.token_ids[start:],
        "response_mask": row.mask[start:],
        "response_logprobs": row.logprobs[start:],
        "reward_score": row.scored.figures.total,
        "num_turns": row.turns,
        "metrics": {},
        "extra_fields": row.origin
        | {name: None if values is None else values[start:] for name, values in credit.items()},
    }


def _openenv(scored: ScoredTrajectory, credit: Credit | None) -> Exported:
    """A ``TrainingTrace``: every call with its whole prompt."""
    trajectory, figures = scored.trajectory, scored.figures
    turns = []
    for index, turn in enumerate(trajectory.turns):
        trains = not turn.frozen if credit is None else credit.weights[index] > 0
        if turn.output_ids:
            turns.append(
                {
                    "node_id": f"{trajectory.id}/{index}",
                    "prompt_token_ids": list(turn.prompt_ids),
                    "completion_token_ids": list(turn.output_ids),
                    "per_token_logps": list(turn.logprobs),
                    "loss_mask": [0] * len(turn.prompt_ids) + [int(trains)] * len(turn.output_ids),
                    "metadata": {
                        "group": figures.group_id,
                        "reward": figures.total,
                        "kind": turn.kind,
                        "condensed": turn.condensation is not None,
                        "advantage": None if credit is None else credit.advantages[index],
                        "weight": None if credit is None else credit.weights[index],
                    },
                }
            )
    return {"schema_version": 1, "turns": turns}
