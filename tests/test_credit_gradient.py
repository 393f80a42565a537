"""The gradient of a real model through score, advantage, weight and loss: the same however the rows are cut.

Sixteen trajectories of one to four turns, some condensed, some continuing, in nine layouts: see ``cuts``, and padded.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from typing import get_args

import pytest
import torch
from builders import condensation, scored, trajectory, turn
from estimating import ESTIMATORS, LOSSES, of_scores
from packed import collate, trained_logprobs
from tiny import VOCABULARY, qwen3
from token_columns import columns, places_of
from torch import Tensor

from condensegrpo.algorithms.credit import rows_of, scores_of, turn_tokens
from condensegrpo.algorithms.objective import (
    MicroBatchLoss,
    Objective,
    ObjectiveFunction,
    token_weights,
    totals,
)
from condensegrpo.algorithms.packing import PackedBatch, blocks, micro_batches, pack
from condensegrpo.algorithms.settings import Aggregation, Level, Mode
from condensegrpo.core.scored_trajectory import ScoredTrajectory
from condensegrpo.core.trajectory import Segment, Turn

HARDEST = ("a row a turn", "shared prefixes", "two ranks")  # of ``cuts``: each changes what a row holds or knows
OPTIONS = {"efficient": {"context_low": 2, "context_high": 30, "accuracy": "none"}}
WIDE = {  # bounds that ratios of an untrained model stay within: a token beyond one would have no gradient to compare
    "clipped": {"clip_low": 0.999, "clip_high": 1e6},
    "gspo": {"clip_low": 0.999, "clip_high": 1e6},
    "cispo": {"clip_high": 1e6},
    "reinforce": {},
}


def one_trajectory(number: int, *, continues: bool) -> ScoredTrajectory:
    """One to four turns of one to three tokens; each prompt continues the last, or is new and declared condensed."""
    draw = random.Random(number)
    turns: list[Turn] = []
    for index in range(draw.randint(1, 4)):
        fresh = [draw.randrange(VOCABULARY) for _ in range(draw.randint(2, 5))]
        before = [*turns[-1].prompt_ids, *turns[-1].output_ids] if turns and continues else []
        prompt = [*before, *fresh]
        output = [draw.randrange(VOCABULARY) for _ in range(draw.randint(1, 3))]
        declared = (
            None if not turns or continues else condensation("d" * index, [3] * index, before=20, after=len(prompt))
        )
        logprobs = [draw.uniform(-4, -1) for _ in output]
        turns.append(turn(prompt, output, logprobs=logprobs, condensation=declared))
    right = float(draw.random() < 0.5)
    total = right or draw.random()  # in [0, 1], as the estimator efficient wants it
    return scored(trajectory(*turns, id=f"g{number // 4}/{number}", group=f"g{number // 4}"), total, correct=right)


@cache
def batch_of_16() -> tuple[ScoredTrajectory, ...]:
    return tuple(one_trajectory(number, continues=number % 2 == 0) for number in range(16))


def rows(
    *,
    estimator: str = "grpo",
    aggregation: str = "trajectory_constant",
    kl_aggregation: str | None = None,
    ranks: Sequence[slice] = (slice(None),),
) -> list[Segment]:
    """The training rows of the sixteen: what ``train`` does on every rank between rollout and optimiser step."""
    made = list[Segment]()
    everything = totals(turn_tokens(batch_of_16()), scores_of(batch_of_16()).turns_N)
    for share in (batch_of_16()[rank] for rank in ranks):
        scores, tokens_NK = scores_of(share), turn_tokens(share)
        advantage_NK = of_scores(estimator, OPTIONS.get(estimator, {}))(scores)
        weight_NK, kl_weight_NK = (
            token_weights(
                mode,  # type: ignore[arg-type]  # an Aggregation
                tokens_NK,
                totals=everything,
                max_tokens=12,
            )
            for mode in (aggregation, kl_aggregation or aggregation)
        )
        made += rows_of(share, advantage_NK, weight_NK, kl_weight_NK=kl_weight_NK if kl_aggregation else None)
    return made


def apart(row: Segment) -> list[Segment]:
    """A merged row as one row a turn: the earlier turns of it are context to the later ones."""
    return [
        replace(row, token_ids=row.token_ids[: turn.positions.stop], turns=(turn,), first_turn=turn.turn)
        for turn in row.turns
    ]


def padded_logprobs(model: torch.nn.Module, batch: Sequence[Segment]) -> Tensor:
    """The long way: rows side by side, padded on the right, all logits, one softmax, gather."""
    longest = max(len(row.token_ids) for row in batch)
    ids_RL = torch.tensor([[*row.token_ids, *[0] * (longest - len(row.token_ids))] for row in batch])
    mask_RL = torch.tensor([[1] * len(row.token_ids) + [0] * (longest - len(row.token_ids)) for row in batch])
    logp_RLV = model(input_ids=ids_RL, attention_mask=mask_RL, use_cache=False).logits.float().log_softmax(dim=-1)
    places = [(number, place) for number, row in enumerate(batch) for place in places_of(row)]
    return torch.stack([logp_RLV[number, place - 1, ids_RL[number, place]] for number, place in places])


def gradient(
    cut: Sequence[Sequence[Segment] | PackedBatch],
    objective: ObjectiveFunction,
    *,
    padded: bool = False,
    seed: int = 0,
) -> dict[str, Tensor]:
    """The gradient of Σ w·l + Σ u·k over all parameters, from micro-batches of these rows."""
    model = qwen3(seed)
    for some in cut:
        batch = some if isinstance(some, PackedBatch) else collate(some)
        logp_T = (
            padded_logprobs(model, some)
            if padded and not isinstance(some, PackedBatch)
            else trained_logprobs(model, batch)
        )
        MicroBatchLoss(objective, batch)(logp_T).loss.backward()
    return gradients_of(model)


def gradients_of(model: torch.nn.Module) -> dict[str, Tensor]:
    return {name: each.grad for name, each in model.named_parameters() if each.grad is not None}


def pieces(some: Sequence[Segment], size: int) -> list[Sequence[Segment]]:
    return [some[start : start + size] for start in range(0, len(some), size)]


def assert_same(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert found.keys() == wanted.keys()
    scale = max(float(each.abs().max()) for each in wanted.values())
    assert scale > 1e-4, "there is a gradient to compare"
    for name, each in wanted.items():
        torch.testing.assert_close(found[name], each, rtol=1e-5, atol=1e-5 * scale)


def cuts(**how: str) -> dict[str, Sequence[Sequence[Segment] | PackedBatch]]:
    """The same rows cut in every way that training may cut them."""
    some = rows(**how)  # type: ignore[arg-type]  # no ranks
    shuffled = random.Random(5).sample(some, len(some))
    packed = pack([len(row.token_ids) for row in some], 40)
    of_turns = [piece for row in some for piece in apart(row)]  # each begins with those before it
    trees = list(micro_batches(blocks(of_turns, max_tokens=40, share=True), max_tokens=40))
    assert sum(batch.token_ids.numel() for batch in trees) < sum(len(row.token_ids) for row in of_turns)
    uneven = (slice(0, 4), slice(4, 16))  # groups are whole
    return {
        "1×16": [some],
        "4×4": pieces(some, (len(some) + 3) // 4),
        "16×1": pieces(some, 1),
        "shuffled": pieces(shuffled, 5),
        "packed to a budget": [[some[index] for index in batch] for batch in packed],
        "a row a turn": pieces(of_turns, 6),
        "shared prefixes": trees,
        "two ranks": pieces(rows(**how, ranks=uneven), 5),  # type: ignore[arg-type]  # as above
    }


@pytest.mark.parametrize("loss", LOSSES)
def test_the_gradient_of_every_loss_is_the_same_however_the_rows_are_cut(loss: str) -> None:
    """trl#3021, open-instruct#1161: a mean over the micro-batch; SkyRL#1529: one over the rows."""
    some = rows()
    objective = Objective(loss=LOSSES[loss], loss_options=WIDE[loss])
    wanted = gradient(pieces(some, 1), objective, padded=True)
    for cut in cuts().values():
        assert_same(gradient(cut, objective), wanted)
    assert_same(gradient([some], objective, padded=True), wanted)


@pytest.mark.parametrize("aggregation", get_args(Aggregation))
def test_the_gradient_under_every_aggregation_is_the_same_however_the_rows_are_cut(aggregation: str) -> None:
    """verl#6025, TRL#7206: denominators span micro-batches, ranks and the accumulation window."""
    some = rows(aggregation=aggregation)
    objective = Objective(loss=LOSSES["clipped"], loss_options=WIDE["clipped"])
    wanted = gradient(pieces(some, 5), objective, padded=True)
    for cut in cuts(aggregation=aggregation).values():
        assert_same(gradient(cut, objective), wanted)


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_the_gradient_of_every_estimator_is_the_same_however_the_rows_are_cut(estimator: str) -> None:
    some = rows(estimator=estimator)
    objective = Objective(loss=LOSSES["clipped"], loss_options=WIDE["clipped"])
    wanted = gradient(pieces(some, 5), objective, padded=True)
    made = cuts(estimator=estimator)
    for name in HARDEST:
        assert_same(gradient(made[name], objective), wanted)


@pytest.mark.parametrize(("level", "mode"), [("token", "truncate"), ("turn", "truncate"), ("turn", "mask")])
def test_importance_weights_and_a_kl_term_do_not_depend_on_the_cut_either(level: Level, mode: Mode) -> None:
    objective = Objective(
        loss=LOSSES["clipped"],
        loss_options=WIDE["clipped"],
        importance_cap=20.0,
        importance_level=level,
        importance_mode=mode,
        kl_estimator="k3",
        kl_coefficient=0.3,
    )
    some = rows()
    wanted = gradient(pieces(some, 5), objective)
    for cut in cuts().values():
        assert_same(gradient(cut, objective), wanted)


@pytest.mark.parametrize("kl_aggregation", get_args(Aggregation))
def test_a_kl_term_with_an_aggregation_of_its_own_does_not_depend_on_the_cut(kl_aggregation: str) -> None:
    objective = Objective(loss=LOSSES["reinforce"], kl_estimator="k2", kl_coefficient=3.0)
    own, shared = rows(kl_aggregation=kl_aggregation), rows()
    wanted = gradient(pieces(own, 5), objective, padded=True)
    made = cuts(kl_aggregation=kl_aggregation)
    for name in HARDEST:
        assert_same(gradient(made[name], objective), wanted)
    moved = sum(float((each - wanted[name]).norm()) for name, each in gradient([shared], objective).items())
    change = moved / sum(float(each.norm()) for each in wanted.values())
    assert (
        change < 1e-5 if kl_aggregation == "trajectory_constant" else change > 0.01
    )  # the constant is the losses' own


def test_duplicated_turns_of_a_sibling_change_nobodys_statistics() -> None:
    """PITFALLS 18: were statistics over rows, the siblings' advantages would move with the length of one."""
    everything = list(batch_of_16()[:4])
    long = everything[0].trajectory
    before = of_scores("grpo")(scores_of(everything))
    doubled = scored(
        trajectory(*long.turns, *long.turns, id=long.id, group=long.group_id),
        everything[0].score.total,
        correct=everything[0].score.correct,
    )
    after = of_scores("grpo")(scores_of([doubled, *everything[1:]]))
    assert after[:, 0].tolist() == before[:, 0].tolist()


def finite_differences(
    logits_SV: Tensor, batch: PackedBatch, objective: Callable[[Tensor, PackedBatch], Tensor]
) -> Tensor:
    """∂ loss / ∂ logit of every place and word, by central differences in double precision."""

    def loss(at_SV: Tensor) -> float:
        logp_T = at_SV[batch.source].log_softmax(dim=-1).gather(1, batch.target[:, None])[:, 0]
        return float((batch.weights.double() * objective(logp_T, batch)).sum())

    step = 1e-5
    found_SV = torch.zeros_like(logits_SV)
    for place in range(logits_SV.shape[0]):
        for word in range(logits_SV.shape[1]):
            moved_SV = torch.zeros_like(logits_SV)
            moved_SV[place, word] = step
            found_SV[place, word] = (loss(logits_SV + moved_SV) - loss(logits_SV - moved_SV)) / (2 * step)
    return found_SV


@pytest.mark.parametrize("loss", LOSSES)
def test_a_logit_has_a_gradient_if_and_only_if_the_token_it_predicts_was_sampled(loss: str) -> None:
    """RAGEN#71, minimind#621: masks inverted or shifted by one; NeMo-RL#2176: replies in the prompt trained."""
    row = rows()[0]
    batch = collate([row])
    with torch.no_grad():
        logits_SV = qwen3()(input_ids=batch.token_ids, use_cache=False).logits[0].double()
    minimised = Objective(loss=LOSSES[loss], loss_options=WIDE[loss])
    found_SV = finite_differences(logits_SV, batch, lambda logp_T, rows: minimised(logp_T, rows).loss_T)
    predicts_sampled_S = [*columns(row).trained[1:], False]
    assert any(predicts_sampled_S)
    if loss == "cispo":  # its ratio is a constant to the gradient and not to a difference: only the places can be told
        assert (found_SV != 0).any(dim=1).tolist() == predicts_sampled_S
        return
    at_SV = logits_SV.clone().requires_grad_()
    logp_T = at_SV[batch.source].log_softmax(dim=-1).gather(1, batch.target[:, None])[:, 0]
    (batch.weights.double() * minimised(logp_T, batch).loss_T).sum().backward()
    assert at_SV.grad is not None
    torch.testing.assert_close(found_SV, at_SV.grad, rtol=1e-4, atol=1e-9)
    assert (at_SV.grad != 0).all(dim=1).tolist() == predicts_sampled_S
