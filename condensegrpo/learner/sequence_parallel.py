"""Sequence parallelism: k consecutive ranks compute every micro-batch together, for rows that no device holds alone.

DeepSpeed's Ulysses (https://arxiv.org/abs/2309.14509): every rank has a part of the tokens, and in attention a part of
the heads instead.

    S packed tokens ─▶ S/k on each rank ─▶ a layer's linear parts, the LM head on the trained tokens among them
                          q k v  (1, h, S/k, d) ─ all-to-all ─▶ (1, h/k, S, d) ─▶ attention along the paths of trees
                          output (1, S/k, h, d) ◀─ all-to-all ─ (1, S, h/k, d) ◀─┘

Attention sees the whole micro-batch, so that trees and packed rows need nothing more. Where there are fewer key
heads than ranks each goes to several. The tokens are padded to a multiple of k, on a GPU also of ``GPU_STEP``, by trees
of one token.

What divides by what: every rank's loss is Σ w·l over the trained tokens that it predicts, so that the losses of all
ranks add up to the loss of the step, and their gradients to its gradient. To DeepSpeed the ranks have different rows.

Until backward a rank keeps in a layer what S/k tokens keep without sequence parallelism, and more: the output of
attention both by heads and by tokens, S/k·h·d further numbers unless the kernel copies its output anyway, as sdpa does;
and, where there are fewer key heads g than ranks, k/g times the keys and values. Masks and indices are those of S
tokens. The LM head
has the trained tokens of the rank, at most all T. Weights, gradients and optimiser are as without: ZeRO divides them
among all ranks.

Legend: k ranks, S packed tokens of a micro-batch, T trained tokens, h query heads, g key heads, d their size.
"""

from dataclasses import dataclass
from functools import partial
from math import lcm

import torch
from torch import Tensor, distributed
from torch.distributed._functional_collectives import all_reduce, wait_tensor  # torch's, with gradient
from torch.nn import functional

from condensegrpo.algorithms.objective import MicroBatchLoss, ObjectiveValue
from condensegrpo.algorithms.packing import PackedBatch
from condensegrpo.core.errors import ConfigError
from condensegrpo.learner.ranks import rank, world_size
from condensegrpo.learner.tree_attention import AttentionPattern

GPU_STEP = 256  # tokens that kernels on a GPU take at a time; they then pad no further


@dataclass(frozen=True, slots=True, eq=False)
class RankGroup:
    """The ranks that share every row with this one."""

    size: int  # k
    index: int  # of this rank among them
    group: distributed.ProcessGroup

    def padded(self, packed: Tensor, device: torch.device) -> Tensor:
        """Packed token ids or positions (…, S) for a device, with zeros behind them so that S divides over ranks."""
        step = self.size if device.type == "cpu" else lcm(self.size, GPU_STEP)
        return functional.pad(packed, (0, -packed.shape[-1] % step))

    def part(self, padded: Tensor) -> Tensor:
        """This rank's part (…, S/k)."""
        return padded.chunk(self.size, dim=-1)[self.index]

    def predicted_here(self, tokens: int, source: Tensor) -> Tensor:
        """The trained tokens (T',) that this rank's part of so many padded tokens predicts, as indices in T."""
        return (source // (tokens // self.size) == self.index).nonzero()[:, 0]

    def together(self, part: Tensor, here_T: Tensor, total: int) -> Tensor:
        """Numbers (T,) of which every rank has those at the indices ``here_T``; on every rank, with gradient."""
        whole_T = part.new_zeros(total).index_put((here_T,), part)
        summed: Tensor = wait_tensor(all_reduce(whole_T, "sum", self.group))  # type: ignore[no-untyped-call]  # torch's
        return summed

    def loss_part(self, loss: MicroBatchLoss, here_T: Tensor) -> MicroBatchLoss:
        """The loss of the trained tokens ``here_T``; it is computed from all tokens where they depend on others."""
        objective = loss.objective if loss.tokenwise else _FromAllTokens(self, loss, here_T)
        return MicroBatchLoss(objective, loss.batch.select(here_T))


@dataclass(frozen=True, slots=True, eq=False)
class _FromAllTokens:
    """An objective of the tokens that this rank predicts, which takes the tokens of all ranks together."""

    ranks: RankGroup
    whole: MicroBatchLoss  # of all T tokens
    here_T: Tensor  # (T',) indices of this rank's

    def __call__(self, logp_part: Tensor, _: PackedBatch) -> ObjectiveValue:
        here_T, batch = self.here_T, self.whole.batch
        value = self.whole.objective(self.ranks.together(logp_part, here_T, len(batch.target)), batch)
        return ObjectiveValue(
            loss_T=value.loss_T[here_T],
            statistics={name: statistic_T[here_T] for name, statistic_T in value.statistics.items()},
            kl_T=None if value.kl_T is None else value.kl_T[here_T],
        )


def rank_group(ranks: int) -> RankGroup:
    """The group of this rank; every rank must call it."""
    if world_size() % ranks:
        raise ConfigError(
            f"checking learner.sequence_parallel: found {ranks}, which does not divide the number of ranks, "
            f"{world_size()}. Start a multiple of {ranks} processes, or set a divisor of {world_size()}."
        )
    group, _ = distributed.new_subgroups(group_size=ranks)  # type: ignore[no-untyped-call]  # torch's
    return RankGroup(ranks, rank() % ranks, group)


@dataclass(frozen=True, slots=True, eq=False)
class Across:
    """Attention along paths by several ranks, of which each has a part of the tokens and computes some heads."""

    ranks: RankGroup
    pattern: AttentionPattern  # of all tokens

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # torch's
    def attend(self, query: Tensor, key: Tensor, value: Tensor, *, scaling: float | None) -> Tensor:
        """The output (1, S/k, h, d) of queries (1, h, S/k, d), keys and values (1, g, S/k, d)."""
        from condensegrpo.learner.deepspeed_import import exchanging_heads  # a plan needs no DeepSpeed

        copies = self.ranks.size // key.shape[1]
        if copies > 1:
            key, value = (each.repeat_interleave(copies, dim=1) for each in (key, value))
        exchange = exchanging_heads(partial(self._attend_all, scaling=scaling), self.ranks.group)
        output: Tensor = exchange(*(each.transpose(1, 2) for each in (query, key, value)), batch_dim_idx=0)
        return output

    def _attend_all(self, query: Tensor, key: Tensor, value: Tensor, *, scaling: float | None) -> Tensor:
        return self.pattern.attend(*(each.transpose(1, 2) for each in (query, key, value)), scaling=scaling)
