"""The ways to compute one optimiser step's gradient that the learner's benchmark compares.

Every pass takes the same rows to the same gradient: Σ w·l over the trained tokens, l the clipped policy loss. Turning
rows into tensors is part of it. Passes of the field (``whole_batch`` to ``output_only``) are written with
transformers alone; those named ``shared`` and ``step`` are the learner's own; ``limit`` is what nothing can beat that
computes the same tokens with this model.

Legend: B rows and L columns of a padded batch, T trained tokens, V vocabulary, H hidden size.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional
from transformers import PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from condensegrpo.algorithms.losses import clipped
from condensegrpo.algorithms.objective import Objective, PerToken
from condensegrpo.algorithms.packing import PackedBatch, blocks, lay_out, micro_batches
from condensegrpo.core.trajectory import Segment
from condensegrpo.learner.engine import open_deepspeed, optimizer_step
from condensegrpo.learner.layers import compile_layers
from condensegrpo.learner.logprobs import TrainedLogprobs
from condensegrpo.learner.micro_batches import pack_rows
from condensegrpo.learner.settings import OptimizerSettings

# The weights that learn are those sampled from: what a run with one update of a batch minimises.
OBJECTIVE = PerToken(Objective(loss=clipped, first_update=True))
DENSE_ROW = 1024  # tokens one after another in one row of plain dense attention, which computes every pair of them
TILE = 256  # trained tokens whose logits exist at a time in ``limit``


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSize:
    """A Qwen3 with random weights and tied embeddings."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head: int  # channels of one attention head
    ffn: int
    vocabulary: int

    def build(self, *, seed: int, dtype: torch.dtype, device: str = "cpu") -> PreTrainedModel:
        """The model in evaluation mode; its weights are drawn on the device, which takes a GPU no time."""
        torch.manual_seed(seed)
        config = Qwen3Config(
            vocab_size=self.vocabulary,
            hidden_size=self.hidden,
            intermediate_size=self.ffn,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            head_dim=self.head,
            max_position_embeddings=4096,
            tie_word_embeddings=True,
            attn_implementation="sdpa",
        )
        with torch.device(device):
            return Qwen3ForCausalLM(config).to(dtype=dtype).eval()


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """What all passes are given alike."""

    tokens: int  # of a micro-batch
    dtype: Literal["float32", "bfloat16"]
    device: str


Step = Callable[[Sequence[Segment]], float | None]  # the gradient's norm, where the gradient itself is freed
Prepare = Callable[[PreTrainedModel, Budget, Sequence[Segment]], Step]


def whole_batch(model: PreTrainedModel, budget: Budget, _: Sequence[Segment]) -> Step:
    """All rows padded to the longest, logits at every position."""

    def step(rows: Sequence[Segment]) -> None:
        _everywhere(model, rows)

    return step


def by_length(model: PreTrainedModel, budget: Budget, _: Sequence[Segment]) -> Step:
    """Padded micro-batches of rows of like length, logits at every position."""

    def step(rows: Sequence[Segment]) -> None:
        for some in sorted_batches(rows, budget.tokens):
            _everywhere(model, some)

    return step


def without_padding(model: PreTrainedModel, budget: Budget, _: Sequence[Segment]) -> Step:
    """Rows one after another, block-diagonal dense attention, logits at every position."""

    def step(rows: Sequence[Segment]) -> None:
        room = max(DENSE_ROW, max(len(row.token_ids) for row in rows))
        for micro_batch in micro_batches(blocks(rows, max_tokens=room, share=False), max_tokens=room):
            batch = _on_device(micro_batch, model)
            ids, positions = batch.token_ids, batch.position_ids
            next_S = ids.roll(-1)  # what follows the end of a row is nobody's target
            logp_S = _of_next(model(input_ids=ids, position_ids=positions, use_cache=False).logits, next_S)
            _descend(logp_S[batch.source], batch)

    return step


def output_only(model: PreTrainedModel, budget: Budget, _: Sequence[Segment]) -> Step:
    """Padded micro-batches of rows of like length, the LM head on trained positions alone."""

    def step(rows: Sequence[Segment]) -> None:
        for some in sorted_batches(rows, budget.tokens):
            batch = _on_device(lay_out([(row,) for row in some]), model)
            ids_BL, index_T = padded(some)
            hidden = model.get_decoder()(input_ids=ids_BL.to(model.device), use_cache=False).last_hidden_state
            logits_T = model.get_output_embeddings()(hidden.flatten(0, 1)[index_T.to(model.device)]).float()
            _descend(-functional.cross_entropy(logits_T, batch.target, reduction="none"), batch)

    return step


def shared(model: PreTrainedModel, budget: Budget, _: Sequence[Segment], *, trees: bool = True) -> Step:
    """The learner's own pass: packed rows, shared prefixes once, its own head; without DeepSpeed."""
    module = TrainedLogprobs(model)
    share = trees and module.computes_trees

    def step(rows: Sequence[Segment]) -> None:
        for micro_batch in pack_rows(rows, max_tokens=budget.tokens, share=share):
            module(module.place(micro_batch, model.device), 1.0, objective=OBJECTIVE).loss.backward()

    return step


def compiled(model: PreTrainedModel, budget: Budget, rows: Sequence[Segment]) -> Step:
    """The learner's own pass with compiled decoder layers; they are compiled here."""
    compile_layers(model)
    step = shared(model, budget, rows)
    step(rows)
    model.zero_grad()
    return step


unshared: Prepare = partial(shared, trees=False)


def optimiser_step(model: PreTrainedModel, budget: Budget, _: Sequence[Segment]) -> Step:
    """The learner's whole step: what training calls, with DeepSpeed, clipping, AdamW and statistics."""
    # so small a rate that the first step does not move the gradient of the next
    optimiser = OptimizerSettings(lr=1e-12)
    engine = open_deepspeed(model, zero_stage=0, optimizer=optimiser, total_steps=1000, dtype=budget.dtype)
    share = engine.module.computes_trees

    def step(rows: Sequence[Segment]) -> float:
        batches = pack_rows(rows, max_tokens=budget.tokens, share=share)
        return optimizer_step(engine, batches, OBJECTIVE)["grad_norm"]

    return step


def limit(model: PreTrainedModel, budget: Budget, rows: Sequence[Segment]) -> Step:
    """The bare model on as many tokens as the learner computes, perfectly packed; no loss, optimiser or bookkeeping.

    The decoder computes full rows of one length, the mean of the real ones, so that a token sees as many keys in the
    mean and attention is causal without a mask. The LM head computes as many positions as there are trained tokens,
    tile by tile, its logits standing in for their own gradient: three products with the weight and nothing else.
    Tensors are made beforehand.
    """
    batches = pack_rows(rows, max_tokens=budget.tokens, share=TrainedLogprobs(model).computes_trees)
    computed, trained = (
        sum(micro_batch.token_ids.numel() for micro_batch in batches),
        sum(micro_batch.target.numel() for micro_batch in batches),
    )
    columns = round(sum(len(row.token_ids) for row in rows) / len(rows))
    count = max(1, round(computed / columns))
    ids_BL = torch.randint(model.config.vocab_size, (count, columns), device=model.device)
    indices = torch.linspace(0, count * columns - 1, trained, device=model.device).long()

    def step(_: Sequence[Segment]) -> None:
        first = 0
        for some in ids_BL.split(max(1, budget.tokens // columns)):
            hidden = model.get_decoder()(input_ids=some, use_cache=False).last_hidden_state.flatten(0, 1)
            here = indices[(indices >= first) & (indices < first + len(hidden))] - first
            first += len(hidden)
            _bare(model, hidden, here)

    return step


def sorted_batches(rows: Sequence[Segment], max_tokens: int) -> Iterator[list[Segment]]:
    """The rows, longest first, in batches of at most so many tokens with padding; a longer row is alone."""
    batch: list[Segment] = []
    for row in sorted(rows, key=lambda row: -len(row.token_ids)):
        if batch and (len(batch) + 1) * len(batch[0].token_ids) > max_tokens:
            yield batch
            batch = []
        batch.append(row)
    if batch:
        yield batch


def padded(rows: Sequence[Segment]) -> tuple[Tensor, Tensor]:
    """Rows padded on the right, which causal attention needs no mask for, and what predicts their trained tokens.

    Example: rows [5 6 7*] and [8 9*] (trained where starred) give [[5 6 7] [8 9 0]] and the indices 1 and 3.

    Returns:
        ids (B, L) and indices (T,) of the flattened ids, in the order of ``lay_out``.
    """
    columns = max(len(row.token_ids) for row in rows)
    ids = torch.tensor([[*row.token_ids, *[0] * (columns - len(row.token_ids))] for row in rows])
    indices = [
        number * columns + position - 1
        for number, row in enumerate(rows)
        for turn in row.turns
        for position in turn.positions
    ]
    return ids, torch.tensor(indices)


def _on_device(batch: PackedBatch, model: PreTrainedModel) -> PackedBatch:
    return PackedBatch(**{name: tensor.to(model.device) for name, tensor in batch.columns.items()})


def _everywhere(model: PreTrainedModel, rows: Sequence[Segment]) -> None:
    batch = _on_device(lay_out([(row,) for row in rows]), model)
    ids_BL, index_T = (part.to(model.device) for part in padded(rows))
    next_BL = ids_BL.roll(-1, dims=1)  # what follows the last column is nobody's target
    logp = _of_next(model(input_ids=ids_BL, use_cache=False).logits, next_BL)
    _descend(logp[index_T], batch)


def _of_next(logits: Tensor, next_tokens: Tensor) -> Tensor:
    """Log-probabilities (B·L,) of the tokens (B, L) that follow each position."""
    return -functional.cross_entropy(logits.flatten(0, 1).float(), next_tokens.flatten(), reduction="none")


def _descend(logp_T: Tensor, batch: PackedBatch) -> None:
    (batch.weights * OBJECTIVE(logp_T, batch).loss_T).sum().backward()


def _bare(model: PreTrainedModel, hidden: Tensor, indices: Tensor) -> None:
    """Backward through head and decoder, the logits at ``indices`` being their own gradient: three products a tile."""
    weight = model.get_output_embeddings().weight
    if weight.grad is None:
        weight.grad = torch.zeros_like(weight)
    chosen = hidden[indices]
    with torch.no_grad():
        grads = []
        for tile in chosen.split(TILE):
            logits = tile @ weight.T
            grads.append(logits @ weight)
            weight.grad.addmm_(logits.T, tile)
    chosen.backward(torch.cat(grads))
