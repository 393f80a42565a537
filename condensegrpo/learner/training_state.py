"""The state before an optimiser step, by the names of weights: fp32 weights, AdamW's moments, and the steps taken.

A rank holds pieces of it, and a piece says which elements of which weight it holds. Any number of ranks under any ZeRO
stage can therefore take up what others saved:

    weights a (6 elements), b (4)     ZeRO 1, 2 ranks          ZeRO 3, 2 ranks          one rank
                                      rank 0   a[0:5]          a[0:3]  b[0:2]           a[0:6]  b[0:4]
                                      rank 1   a[5:6]  b[0:4]  a[3:6]  b[2:4]

``to_main_memory`` moves moments, fp32 weights and gradients out of the GPU while the sampler needs it. The weights that
the model computes with stay: the sampler gets them while the state is away. An optimiser step needs the state;
measuring, sending weights and saving a checkpoint do not. DeepSpeed cannot move it in bfloat16 below ZeRO 2, which
``config/checks.py`` refuses.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple, TypedDict

import torch
from torch import Tensor, distributed, nn
from torch.optim.lr_scheduler import LambdaLR

from condensegrpo.core.errors import CheckpointError
from condensegrpo.learner.deepspeed_import import DeepSpeedEngine, deepspeed, get_accelerator, without_deprecations
from condensegrpo.learner.ranks import rank

WEIGHT, MOMENTS = "weight", ("exp_avg", "exp_avg_sq")
_states = deepspeed.runtime.zero.offload_states
_Kind = deepspeed.runtime.zero.offload_config.OffloadStateTypeEnum


class SavedState(TypedDict):
    """The state of one rank, as ``torch.save`` writes it."""

    steps: int  # of the optimiser
    scheduled: int  # of the schedule
    pieces: dict[str, tuple[int, dict[str, Tensor]]]  # weight -> its first element here, flat values by WEIGHT, MOMENTS


class _Piece(NamedTuple):
    """The piece of a weight that this rank has, in DeepSpeed's tensors."""

    flat: Tensor  # fp32, that AdamW updates
    offset: int  # of the piece in it
    start: int  # of the piece in the flattened weight
    length: int


def training_state(engine: DeepSpeedEngine) -> SavedState:
    """This rank's part of the state. Its tensors are the engine's own: copy or write them before the next step."""
    schedule: LambdaLR = engine.lr_scheduler
    pieces = {name: (piece.start, _values(engine, piece)) for name, piece in _pieces(engine)}
    steps = {int(state["step"]) for state in schedule.optimizer.state.values() if state}
    if engine.zero_optimization_stage() == 0 and rank() > 0:  # all ranks hold the same
        pieces = {}
    return SavedState(steps=max(steps, default=0), scheduled=schedule.last_epoch, pieces=pieces)


@torch.no_grad()
def restore_training_state(engine: DeepSpeedEngine, saved: Sequence[SavedState]) -> None:
    """Take up the states of all ranks that saved; every rank must call it. The learning rate is not touched."""
    saved_pieces: dict[str, list[tuple[int, dict[str, Tensor]]]] = {}
    for state in saved:
        for name, saved_piece in state["pieces"].items():
            saved_pieces.setdefault(name, []).append(saved_piece)
    sharded = engine.zero_optimization_stage() == 3
    for name, tensor in _trainable(engine):
        with without_deprecations(), deepspeed.zero.GatheredParameters([tensor], modifier_rank=0, enabled=sharded):
            if not sharded or rank() == 0:
                tensor.copy_(_elements(name, saved_pieces[name], WEIGHT, 0, tensor.numel()).view_as(tensor))
    for name, piece in _pieces(engine):
        for key, values in _values(engine, piece).items():
            values.copy_(_elements(name, saved_pieces[name], key, piece.start, piece.length))
    schedule: LambdaLR = engine.lr_scheduler
    for adamw_state in schedule.optimizer.state.values():
        adamw_state["step"].fill_(saved[0]["steps"])
    at_schedule(engine, saved[0]["scheduled"])


def at_schedule(engine: DeepSpeedEngine, step: int) -> None:
    """Put the schedule before optimiser step ``step`` (from 0), whatever was skipped before it."""
    schedule: LambdaLR = engine.lr_scheduler
    schedule.last_epoch = step
    for group, rate, part in zip(schedule.optimizer.param_groups, schedule.base_lrs, schedule.lr_lambdas, strict=True):
        group["lr"] = rate * part(step)


def _trainable(engine: DeepSpeedEngine) -> Iterator[tuple[str, nn.Parameter]]:
    yield from ((name, each) for name, each in engine.module.policy.named_parameters() if each.requires_grad)


def _pieces(engine: DeepSpeedEngine) -> Iterator[tuple[str, _Piece]]:
    """The pieces of this rank, in DeepSpeed's own structures."""
    stage, zero, adamw = engine.zero_optimization_stage(), engine.optimizer, engine.lr_scheduler.optimizer
    for name, tensor in _trainable(engine):
        if stage == 0:
            yield name, _Piece(tensor, 0, 0, tensor.numel())
        elif stage == 3:
            group, offset, length = zero.grad_position[zero.get_param_id(tensor)]
            start = length * distributed.get_rank(zero.dp_process_group)
            rest = max(0, min(length, tensor.ds_numel - start))  # type: ignore[attr-defined]  # slices are padded
            yield name, _Piece(zero.fp32_partitioned_groups_flat[group], offset, start, rest)
        elif tensor._hp_mapping is not None:  # type: ignore[attr-defined]  # DeepSpeed's
            mapping = tensor._hp_mapping  # type: ignore[attr-defined]  # DeepSpeed's
            flat = adamw.param_groups[mapping.param_group_index]["params"][0]
            in_flat, in_weight = mapping.hp_fragment_address, mapping.lp_fragment_address
            yield name, _Piece(flat, in_flat.start, in_weight.start, in_flat.numel)


def _values(engine: DeepSpeedEngine, piece: _Piece) -> dict[str, Tensor]:
    """Views of the weight and of its moments, which AdamW would create in its first step."""
    state = engine.lr_scheduler.optimizer.state[piece.flat]
    if not state:
        state["step"] = torch.zeros((), dtype=torch.float32, device=piece.flat.device)
        state.update({moment: torch.zeros_like(piece.flat) for moment in MOMENTS})
    flat = {WEIGHT: piece.flat.detach(), **{moment: state[moment] for moment in MOMENTS}}
    return {key: tensor.view(-1).narrow(0, piece.offset, piece.length) for key, tensor in flat.items()}


def _elements(
    name: str, pieces: Sequence[tuple[int, Mapping[str, Tensor]]], key: str, start: int, length: int
) -> Tensor:
    """Elements of a weight, or of a moment of it, from the pieces that hold them."""
    elements, filled = torch.empty(length), 0
    for first, tensors in pieces:
        low, high = max(start, first), min(start + length, first + tensors[key].numel())
        if low < high:
            elements[low - start : high - start] = tensors[key][low - first : high - first]
            filled += high - low
    if filled < length:
        raise CheckpointError(
            f"loading {key} of {name} from a checkpoint: found {filled} of {length} numbers from {start} on in the "
            f"files of all ranks. The checkpoint is incomplete: resume from another one."
        )
    if length and not all(map(torch.isfinite, elements.aminmax())):
        raise CheckpointError(
            f"loading {key} of {name} from a checkpoint: found NaN or infinite numbers, wanted finite ones. The "
            f"training that saved it has diverged: resume from an earlier checkpoint, or start again with another "
            f"learning rate."
        )
    return elements


def to_main_memory(engine: DeepSpeedEngine) -> None:
    """Move the state out of the GPU. It may be there already."""
    pinned, stage = torch.accelerator.is_available(), engine.zero_optimization_stage()
    if stage in (1, 2):
        engine.offload_states(include=[_Kind.optim_states, _Kind.hp_params, _Kind.lp_grads], pin_memory=pinned)
        return
    _states.offload_optimizer_states(_adamw(engine), "cpu", pin_memory=pinned)
    if stage == 3:  # DeepSpeed does the rest for its own Adam only
        for tensor in engine.optimizer.fp32_partitioned_groups_flat:
            data = tensor.data
            tensor.data = torch.empty_like(data, device="cpu", pin_memory=True).copy_(data) if pinned else data.cpu()
        engine.offload_states(include=[_Kind.lp_grads, _Kind.contiguous_grad_buffer], pin_memory=pinned)
    get_accelerator().empty_cache()


def to_device(engine: DeepSpeedEngine) -> None:
    """Move the state back to the GPU."""
    stage, device = engine.zero_optimization_stage(), get_accelerator().current_device_name()
    if stage in (1, 2):
        engine.reload_states()
        return
    _states.reload_optimizer_states(_adamw(engine), device)
    if stage == 3:
        for tensor in engine.optimizer.fp32_partitioned_groups_flat:
            tensor.data = tensor.data.to(device)
        engine.reload_states()


@contextmanager
def on_device(engine: DeepSpeedEngine) -> Iterator[None]:
    """The state is on the GPU, and in main memory before and after."""
    to_device(engine)
    try:
        yield
    finally:
        to_main_memory(engine)


def _adamw(engine: DeepSpeedEngine) -> torch.optim.Optimizer:
    """The optimiser of torch: ZeRO wraps it."""
    optimizer: torch.optim.Optimizer = getattr(engine.optimizer, "optimizer", engine.optimizer)
    return optimizer
