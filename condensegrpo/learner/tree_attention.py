"""Attention along the paths of prefix trees: packed tokens lie in one line, and each looks at its own row only.

Everything else in a decoder treats tokens one by one, so that it computes exactly the packed ones, without padding.
Only attention depends on the trees. The depth of every token defines them: where it goes on by one, a token continues
the one before it; where it falls back to p, a new **branch** begins, after the first p tokens of the path before it.

    rows        1 2 3 4     1 2 3 5     1 6

    index       0 1 2 3 4 5                 branch    its keys, by depth
    token       1 2 3 4 5 6                 0 1 2 3   0 1 2 3
    depth       0 1 2 3 3 1                 4         0 1 2 4
                                            5         0 5

A branch's **keys** are the indices of its path from the root, so that the key at depth j is the j-th of them. Hence the
whole rule, whatever the tree:  **a query of depth p sees the keys 0 … p of its path**. Above, the token 5 at index 4
has depth 3 and sees the tokens 1 2 3 5; the token 6 at index 5 has depth 1 and sees 1 6.

Branches are cut into pieces of like size, which need no keys after their own last token. Pieces of like size are
computed together, with keys gathered by index and padding that no query sees:

    buckets of pieces (n, Q queries, K keys) ─▶ one scaled dot product attention each ─▶ outputs back in order

The queries, keys and values of all buckets are gathered at once and then cut into buckets. Backward adds their
gradients up at once as well; gathering for each bucket would give each of them a gradient of all S tokens.

That runs on any device. On a GPU ``tree_kernels.py`` computes the same without
padding; ``attention_kernels.py`` chooses.

In a compiled decoder layer all buckets are one operation of the graph, as micro-batches have different numbers of them.
There is no dropout of the attention: the policy stays in evaluation mode.

Legend: S packed tokens, n pieces of a bucket, Q and K its most queries and keys, h query heads, g key heads, d their
size.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from condensegrpo.core.errors import LearnerError
from condensegrpo.learner.devices import copy_to_device

TREE_ATTENTION = "sdpa_along_paths"  # its name in transformers
PIECE = 128  # most queries of a piece: fewer compute fewer unused pairs, and gather more keys
QUERY_STEP, KEY_STEP = 32, 64  # pieces of a bucket differ by less; finer steps pad less and make more buckets


class AttentionPattern(Protocol):
    """Which of S packed tokens attend to which, and the computation of their attention."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, *, scaling: float | None) -> Tensor:
        """The output (1, S, h, d) of queries (1, h, S, d), keys and values (1, g, S, d)."""


class HostPattern(NamedTuple):
    """An attention pattern before its indices are on the device: they are computed and uploaded, never read back."""

    tokens: int  # S, with padding
    indices: tuple[Tensor, ...]  # in main memory
    of_uploaded: Callable[..., AttentionPattern]  # the pattern, of these indices on the device

    def on(self, device: torch.device) -> AttentionPattern:
        """The pattern on a device, with an upload of its own."""
        return self.of_uploaded(*copy_to_device(self.indices, device))


class BranchPiece(NamedTuple):
    """Consecutive tokens of a branch, and what they look at."""

    start: int  # index of the first query
    end: int  # after the last query
    keys: Sequence[int]  # (depth of the last query + 1,) indices of the path, by depth


class Bucket(NamedTuple):
    """Pieces of like size. A shorter piece is filled up with its last index."""

    queries: tuple[int, int]  # n, Q
    keys: tuple[int, int]  # n, K
    visible: Tensor  # (n, 1, Q, K) bool, whether a query sees a key


class Paths(NamedTuple):
    """The attention pattern of S packed tokens, computed in buckets."""

    buckets: tuple[Bucket, ...]
    queries: Tensor  # (Σ n·Q,) int64, indices of tokens, bucket after bucket
    keys: Tensor  # (Σ n·K,) int64, likewise
    outputs: Tensor  # (S,) int64, where each token's output lies among those of all buckets
    indices: Tensor  # (2·Σ n·Q + Σ n·K + S,) int64: the depth of each query, then the three above
    shapes: Tensor  # (3·buckets,) int64 in main memory: n, Q and K of each; torch compiles a length of 1 for itself

    def attend(self, query: Tensor, key: Tensor, value: Tensor, *, scaling: float | None) -> Tensor:
        """The output (1, S, h, d) of queries (1, h, S, d), keys and values (1, g, S, d)."""
        if torch.compiler.is_compiling():
            compiled: Tensor = attention_along_paths(query, key, value, self.indices, self.shapes, scaling)
            return compiled
        queries = _cut(query, self.queries, [bucket.queries for bucket in self.buckets])
        keys, values = (_cut(each, self.keys, [bucket.keys for bucket in self.buckets]) for each in (key, value))
        outputs = [
            _attended(query_nQ, key_nK, value_nK, bucket.visible, scaling)
            for query_nQ, key_nK, value_nK, bucket in zip(queries, keys, values, self.buckets, strict=True)
        ]
        return torch.cat(outputs).index_select(0, self.outputs)[None]


def paths(depths: Sequence[int]) -> HostPattern:
    """The paths of packed trees.

    Args:
        depths: (S,) of each token in its row, 0 where a tree begins.
    """
    alike: defaultdict[tuple[int, int], list[BranchPiece]] = defaultdict(list)
    for piece in pieces(depths):
        alike[size_class(piece.end - piece.start, len(piece.keys))].append(piece)
    buckets = [
        (_filled([range(piece.start, piece.end) for piece in group]), _filled([piece.keys for piece in group]))
        for _, group in sorted(alike.items())
    ]
    shapes = torch.tensor([(*queries.shape, keys.shape[1]) for queries, keys in buckets]).flatten()
    queries = torch.cat([queries.flatten() for queries, _ in buckets])
    keys = torch.cat([keys.flatten() for _, keys in buckets])
    outputs = torch.empty(len(depths), dtype=torch.int64)
    outputs[queries] = torch.arange(len(queries))  # of a token that occurs twice, either one
    return HostPattern(
        tokens=len(depths),
        indices=(torch.cat([torch.tensor(depths)[queries], queries, keys, outputs]),),
        of_uploaded=partial(_paths, shapes=shapes),
    )


def _paths(indices: Tensor, shapes: Tensor) -> Paths:
    """The paths of these indices and shapes, cut into buckets."""
    sizes: list[list[int]] = shapes.view(-1, 3).tolist()
    queries_by_bucket = [n * most_queries for n, most_queries, _ in sizes]
    queries_end = 2 * sum(queries_by_bucket)
    keys_end = queries_end + sum(n * most_keys for n, _, most_keys in sizes)
    depths, queries, keys, outputs = torch.tensor_split(indices, (queries_end // 2, queries_end, keys_end))
    buckets = tuple(
        Bucket(
            queries=(n, most_queries),
            keys=(n, most_keys),
            visible=(torch.arange(most_keys, device=indices.device) <= depths_n.view(n, most_queries, 1))[:, None],
        )
        for (n, most_queries, most_keys), depths_n in zip(sizes, torch.split(depths, queries_by_bucket), strict=True)
    )
    return Paths(buckets, queries, keys, outputs, indices, shapes)


def pieces(depths: Sequence[int]) -> list[BranchPiece]:
    """The branches in pieces of at most ``PIECE`` queries, those of one branch of like size.

    Example: depths 0 1 2 3 3 1 of the tree above give queries 0 … 3, 4 and 5 with keys 0 1 2 3, 0 1 2 4 and 0 5.
    """
    cut: list[BranchPiece] = []
    path: list[int] = []
    for start, end in pairwise([*branch_starts(depths), len(depths)]):
        above = depths[start]
        path[above:] = range(start, end)
        cut += [
            BranchPiece(start + first, start + last, path[: above + last])
            for first, last in pairwise(piece_bounds(end - start))
        ]
    return cut


def piece_bounds(length: int) -> list[int]:
    """Where a branch is cut: pieces of like size of at most ``PIECE`` tokens. Example: 200 tokens give 0, 100, 200."""
    count = -(-length // PIECE)
    return [length * piece // count for piece in range(count + 1)]


def size_class(queries: int, keys: int) -> tuple[int, int]:
    """Pieces of the same class share a bucket."""
    return (queries - 1) // QUERY_STEP, (keys - 1) // KEY_STEP


def branch_starts(depths: Sequence[int]) -> list[int]:
    """The indices where branches begin. Example: depths 0 1 2 3 3 1 give 0, 4 and 5."""
    return [index for index, depth in enumerate(depths) if index == 0 or depth != depths[index - 1] + 1]


def _filled(rows: Sequence[Sequence[int]]) -> Tensor:
    longest = max(map(len, rows))
    return torch.tensor([[*row, *[row[-1]] * (longest - len(row))] for row in rows], dtype=torch.int64)


def use_tree_attention(policy: PreTrainedModel) -> bool:
    """Let the policy's attention follow the ``pattern`` that its decoder is given; without, it is ``sdpa`` as before.

    Returns:
        Whether the model lets its attention be replaced.
    """
    policy.set_attn_implementation(TREE_ATTENTION)
    return str(policy.config._attn_implementation) == TREE_ATTENTION


def pattern_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    pattern: AttentionPattern | None = None,
    **others: Any,  # noqa: ANN401  the layers of different models pass different options
) -> tuple[Tensor, None]:
    """The attention of a decoder layer: queries (1, h, S, d), keys and values (1, g, S, d); the output is (1, S, h, d).

    Args:
        others: of the layer, as transformers' own attention takes them.
    """
    if pattern is None:
        plain: tuple[Tensor, None] = sdpa_attention_forward(module, query, key, value, attention_mask, **others)
        return plain
    more = [name for name in ("sliding_window", "softcap", "s_aux", "position_bias") if others.get(name) is not None]
    if others.get("dropout"):
        more.append("dropout")
    if more:
        raise LearnerError(
            f"computing attention along prefix trees: {type(module).__name__} asks for {', '.join(more)}, wanted is "
            f"plain attention. Pack its rows without trees."
        )
    return pattern.attend(query, key, value, scaling=others.get("scaling")), None


def _cut(states: Tensor, indices: Tensor, shapes: Sequence[tuple[int, int]]) -> list[Tensor]:
    """States (1, heads, S, d) at the indices of all buckets, as one (n, Q or K, heads, d) each."""
    gathered = states[0].transpose(0, 1).index_select(0, indices)
    parts = torch.split(gathered, [pieces * most for pieces, most in shapes])
    return [part.view(*shape, *gathered.shape[1:]) for part, shape in zip(parts, shapes, strict=True)]


def _attended(query_nQ: Tensor, key_nK: Tensor, value_nK: Tensor, visible: Tensor, scaling: float | None) -> Tensor:
    """The outputs (n·Q, h, d) of a bucket. Query heads that share a key head are computed as further queries."""
    n, most = query_nQ.shape[:2]
    heads = key_nK.shape[2]
    sharing = query_nQ.shape[2] // heads
    output = functional.scaled_dot_product_attention(
        query_nQ.view(n, most, heads, sharing, -1).permute(0, 2, 3, 1, 4).flatten(2, 3),
        key_nK.transpose(1, 2),
        value_nK.transpose(1, 2),
        attn_mask=visible.repeat(1, 1, sharing, 1),
        scale=scaling,
    )
    return output.view(n, heads, sharing, most, -1).permute(0, 3, 1, 2, 4).reshape(n * most, heads * sharing, -1)


@torch.library.custom_op("condensegrpo::attention_along_paths", mutates_args=())
def attention_along_paths(
    query: Tensor, key: Tensor, value: Tensor, indices: Tensor, shapes: Tensor, scaling: float | None
) -> Tensor:
    """``Paths.attend`` as one operation of a compiled graph.

    For backward it keeps queries, keys and values alone: it gathers them, and computes the output, once more. The
    indices are one tensor, longer than any other: torch compiles again where sizes that were equal no longer are.
    """
    return _paths(indices, shapes).attend(query, key, value, scaling=scaling)


@attention_along_paths.register_fake
def _output_shape(query: Tensor, _key: Tensor, value: Tensor, *_: Tensor | float | None) -> Tensor:
    return query.new_empty(1, query.shape[2], query.shape[1], value.shape[3])


@torch.library.custom_op("condensegrpo::attention_along_paths_backward", mutates_args=())
def _gradients(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    indices: Tensor,
    shapes: Tensor,
    scaling: float | None,
) -> tuple[Tensor, Tensor, Tensor]:
    attend = partial(_paths(indices, shapes).attend, scaling=scaling)
    backward = torch.func.vjp(attend, query, key, value)[1]  # autograd is off inside of an operation
    of_query, of_key, of_value = (each.contiguous() for each in backward(gradient))
    return of_query, of_key, of_value


@_gradients.register_fake
def _gradient_shapes(
    _gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, *_: Tensor | float | None
) -> tuple[Tensor, Tensor, Tensor]:
    of_query, of_key, of_value = (each.new_empty(each.shape) for each in (query, key, value))
    return of_query, of_key, of_value


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:  # noqa: ANN401  torch's context has no type
    del output
    *tensors, ctx.scaling = inputs
    ctx.save_for_backward(*tensors)


def _backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN401  likewise
    return (*_gradients(gradient, *ctx.saved_tensors, ctx.scaling), None, None, None)


attention_along_paths.register_autograd(_backward, setup_context=_keep)
AttentionInterface.register(TREE_ATTENTION, pattern_attention)
AttentionMaskInterface.register(TREE_ATTENTION, sdpa_mask)
