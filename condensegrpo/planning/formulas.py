"""What a run allocates on one device, in bytes: pure formulas of numbers, each with the tensors that it counts.

Every formula names tensors that exist at one moment; none holds a factor that was fitted to a measurement. They follow
transformers' decoder layers, torch's autograd, DeepSpeed's optimisers and this package's own head and sampler.

Legend: S tokens of a micro-batch, L of its longest row, T trained ones, H hidden size, Q = heads · head size,
K = kv heads · head size, F width of the MLP, V vocabulary, P trainable parameters, e bytes of an element of the weights
(4 in float32, 2 in bfloat16).
"""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple

from condensegrpo.learner.tree_attention import piece_bounds, size_class
from condensegrpo.learner.tree_kernels import BLOCK

FLOAT = 4  # bytes of fp32: master weights, moments, norms, log-probabilities
BOOL, INT, INDEX = 1, 4, 8  # of a mask's element, of a block's number, of a token id


class Part(NamedTuple):
    """Something that takes memory."""

    name: str
    bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Decoder:
    """The sizes of a decoder of gated layers with RMS norms: Llama, Mistral, Qwen2, Qwen3 and their like."""

    hidden: int  # H
    layers: int
    heads: int
    kv_heads: int
    head_size: int
    ffn: int  # F
    vocabulary: int  # V
    normed_heads: bool  # queries and keys pass a norm of their own, as in Qwen3
    tied: bool  # the LM head is the embedding

    @property
    def queries(self) -> int:
        """Q."""
        return self.heads * self.head_size

    @property
    def keys(self) -> int:
        """K."""
        return self.kv_heads * self.head_size

    @property
    def embedding(self) -> int:
        """Elements of the embedding, V·H."""
        return self.vocabulary * self.hidden


@dataclass(frozen=True, slots=True, kw_only=True)
class Tower:
    """The sizes of a vision tower with its projector."""

    hidden: int
    layers: int
    heads: int
    ffn: int
    parameters: int
    patches: int  # of a token of a picture
    pixels: int  # numbers of a patch


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """How many parameters there are."""

    trainable: int  # P
    frozen: int
    element: int  # e

    @property
    def bytes(self) -> int:
        """Of one whole copy."""
        return (self.trainable + self.frozen) * self.element


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """The largest micro-batch."""

    tokens: int  # S
    length: int  # L, of the longest row
    trained: int  # T


class Gathered(NamedTuple):
    """What attention along tree paths works on, padding included: over its buckets of n pieces of Q queries, K keys."""

    queries: int  # Σ n·Q
    keys: int  # Σ n·K
    pairs: int  # Σ n·Q·K


class Branch(NamedTuple):
    """Tokens that continue each other."""

    above: int  # tokens of its path before it
    length: int


def gathered(branches: Iterable[Branch]) -> Gathered:
    """What attention along tree paths works on, padding included, from the lengths of branches.

    As in ``learner/tree_attention.py``: branches are cut into pieces, pieces of similar size form a bucket, and each
    bucket is padded to its largest piece.

    Example: a row of 200 tokens is two pieces of 100 queries with 100 and 200 keys, each in a bucket of its own: 200
    queries, 300 keys, 100·100 + 100·200 pairs.
    """
    alike: defaultdict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
    for branch in branches:
        for first, last in pairwise(piece_bounds(branch.length)):
            queries, keys = last - first, branch.above + last
            alike[size_class(queries, keys)].append((queries, keys))
    sizes = [(len(group), max(size[0] for size in group), max(size[1] for size in group)) for group in alike.values()]
    return Gathered(
        queries=sum(n * queries for n, queries, _ in sizes),
        keys=sum(n * keys for n, _, keys in sizes),
        pairs=sum(n * queries * keys for n, queries, keys in sizes),
    )


# --- activations


def norm_bytes(width: int, element: int, *, trained: bool = True, compiled: bool = False) -> int:
    """What an RMS norm keeps of a token: x in fp32, x̂ and y in e, and 1/rms. ``compiled``: x and y in e, and 1/rms.

    x is what pow(2) and the product save, x̂ what the weight's gradient needs if it is ``trained``, y what the next
    linear layer saves. In float32 x is the residual stream itself, which nothing else saves; in bfloat16 it is the copy
    that the norm makes.
    """
    if compiled:
        return 2 * element * width + FLOAT
    return (FLOAT + (2 if trained else 1) * element) * width + FLOAT


def layer_bytes(decoder: Decoder, element: int, *, trained: bool = True, compiled: bool = False) -> int:
    """What one decoder layer keeps of a token until backward, with plain attention.

        two norms                     x, x̂, y each
        norms of queries and keys     x, x̂ (their y is rotated and not kept)
        attention                     q, k, v, its output, and the log of every head's sum in fp32: SDPA and flash
                                      attention keep no L × L matrix
        MLP                           gate, up, act(gate), their product

    Without training its own weights no x̂ is kept; all else is, for the adapters beside them.

    A compiled layer keeps the inputs of its linear layers, their outputs that a norm or act reads, q, k and v. torch's
    partitioner (``min_cut_rematerialization_partition``) computes x̂, act(gate) and copies in fp32 again in backward.

    Example: Llama with H = Q = 48, K = 16, 6 heads, F = 112 in float32: 2·(12·48 + 4) + 4·(2·48 + 2·16) + 4·6 + 4·4·112
    = 3488.
    """
    kept = 2 * norm_bytes(decoder.hidden, element, trained=trained, compiled=compiled)
    if decoder.normed_heads:
        width = element if compiled else FLOAT + (element if trained else 0)
        kept += width * (decoder.queries + decoder.keys) + FLOAT * (decoder.heads + decoder.kv_heads)
    return kept + attention_bytes(decoder, element) + element * (3 if compiled else 4) * decoder.ffn


def attention_bytes(decoder: Decoder, element: int) -> int:
    """What plain attention keeps of a token: q, k, v, its output, and the log of every head's sum."""
    return element * (2 * decoder.queries + 2 * decoder.keys) + FLOAT * decoder.heads


def ends_bytes(decoder: Decoder, element: int, *, trained: bool = True) -> int:
    """What a decoder keeps of a token besides its layers: the token's id, cosine and sine, x and x̂ of the last norm.

    Without training its own weights it needs neither the id nor x̂.
    """
    weights = INDEX + element * decoder.hidden if trained else 0
    return 2 * decoder.head_size * element + FLOAT * decoder.hidden + FLOAT + weights


def activation_bytes(
    decoder: Decoder, batch: MicroBatch, element: int, *, width: int = 0, checkpointed: int = 0, compiled: bool = False
) -> int:
    """What a forward pass keeps until backward, with plain attention.

    Where adapters train beside every linear layer of a frozen base, it keeps A·x of every adapter, r numbers a token.
    Nothing before the first adapter takes a gradient: neither the token's id nor x and 1/rms of the first norm is kept,
    and of the last norm no x̂.

    Args:
        width: the ranks of all adapters together; 0: all weights train.
        checkpointed: the first layers, of which only the input is kept.
        compiled: whether the layers are.
    """
    trained, whole = not width, decoder.layers - checkpointed
    layers = whole * layer_bytes(decoder, element, trained=trained, compiled=compiled)
    layers += checkpointed * element * decoder.hidden
    first_norm = (element if compiled else FLOAT) * decoder.hidden + FLOAT
    unneeded = 0 if trained or checkpointed else first_norm
    adapters = element * (width * whole // max(1, decoder.layers))
    return batch.tokens * (layers - unneeded + ends_bytes(decoder, element, trained=trained) + adapters)


def pixels_bytes(tower: Tower, batch: MicroBatch) -> int:
    """The pixels of a micro-batch whose tokens are all those of pictures, in fp32 as the image processor gives them."""
    return FLOAT * batch.tokens * tower.patches * tower.pixels


def tower_layer_bytes(tower: Tower, batch: MicroBatch, element: int, *, trained: bool) -> int:
    """A layer of the tower, of as many pictures: what it keeps where it is ``trained``, and else its largest moment.

    A layer is counted as a gated one of a decoder, ``layer_bytes``; those that are not gated keep half of its MLP. The
    largest moment of one that keeps nothing: the residual, its norm, gate, up and their product.
    """
    patches = batch.tokens * tower.patches
    if not trained:
        return element * patches * (2 * tower.hidden + 3 * tower.ffn)
    heads, size = tower.heads, tower.hidden // tower.heads
    layer = Decoder(
        hidden=tower.hidden,
        layers=1,
        heads=heads,
        kv_heads=heads,
        head_size=size,
        ffn=tower.ffn,
        vocabulary=0,
        normed_heads=False,
        tied=False,
    )
    return patches * layer_bytes(layer, element)


def tower_bytes(tower: Tower, batch: MicroBatch, element: int, *, checkpointed: bool) -> int:
    """What a tower that trains keeps of as many pictures until backward: its layers, or the input of each."""
    if checkpointed:
        return tower.layers * element * batch.tokens * tower.patches * tower.hidden
    return tower.layers * tower_layer_bytes(tower, batch, element, trained=True)


def paths_bytes(decoder: Decoder, batch: MicroBatch, gathered: Gathered, element: int) -> int:
    """What attention along tree paths keeps more than plain attention.

    once      what each query sees, as booleans; the depth and index of each query, and the indices of keys and outputs
    a layer   queries and their outputs by piece, the outputs in place, keys and values by piece, the log of every
              head's sum; and what is seen in e, for every query head that shares a key head
    """
    once = BOOL * gathered.pairs + INDEX * (2 * gathered.queries + gathered.keys + batch.tokens)
    sharing = decoder.heads // decoder.kv_heads
    numbers = decoder.queries * (2 * gathered.queries + batch.tokens) + 2 * decoder.keys * gathered.keys
    a_layer = element * (numbers + sharing * gathered.pairs) + FLOAT * decoder.heads * gathered.queries
    return once + decoder.layers * (a_layer - batch.tokens * attention_bytes(decoder, element))


def intervals_bytes(batch: MicroBatch) -> int:
    """What ``flex`` keeps more than plain attention, once: 4 lists of blocks of 128 × 128 pairs, an integer a token.

    Example: 8192 tokens are 64 × 64 blocks: 4·4·64² + 4·8192 = 98304.
    """
    blocks = -(-batch.tokens // BLOCK)
    return 4 * INT * blocks**2 + INT * blocks * BLOCK


def branches_bytes(decoder: Decoder, batch: MicroBatch, keys: int, element: int) -> int:
    """What ``flash`` keeps more than plain attention: the gathered keys' indices, once, and their keys and values.

    Args:
        keys: that are gathered, each branch's whole path. ``auto`` takes flash up to ``MOST_KEYS`` of them a token.
    """
    return INDEX * keys + decoder.layers * element * 2 * decoder.keys * (keys - batch.tokens)


def eager_bytes(decoder: Decoder, batch: MicroBatch, element: int) -> int:
    """What eager attention keeps more than SDPA: of every pair and head the softmax in fp32, and its copy in e.

    In float32 there is no copy. Keys and values are repeated for every head; the logs of the sums are not there. The
    causal mask is there once, in e, for one row.
    """
    pairs = batch.tokens * batch.length
    copies = FLOAT + (element if element != FLOAT else 0)
    repeated = 2 * (decoder.queries - decoder.keys) * batch.tokens
    a_layer = decoder.heads * pairs * copies + element * repeated - FLOAT * decoder.heads * batch.tokens
    return element * batch.length**2 + decoder.layers * a_layer


# --- the moments of a step


def head_bytes(decoder: Decoder, batch: MicroBatch, *, tile: int, element: int, trained: bool = True) -> int:
    """The LM head in one pass, at its largest, in the last of its tiles.

    tile · V · 4            logits, which become their own gradient in place; below fp32 also e twice, as the product
                            leaves them and as the next one takes them
    e·T·H twice             the hidden states of trained positions and their gradient
    4·V·H                   the gradient of the head's weight in fp32, if that is ``trained``; below fp32 also in e
    """
    words = min(batch.trained, tile) * decoder.vocabulary
    narrow = 0 if element == FLOAT else element
    weight = (FLOAT + narrow) * decoder.embedding if trained else 0
    return (FLOAT + 2 * narrow) * words + 2 * element * batch.trained * decoder.hidden + weight


def chunked_head_bytes(
    decoder: Decoder, batch: MicroBatch, *, chunk_tokens: int, element: int, trained: bool = True
) -> int:
    """The LM head under an objective of whole turns, in backward, at its largest, in the last of its chunks.

    3 · chunk · V · 4             log-probabilities, their gradient, the gradient of the logits
    e·T·H twice                   the hidden states of trained positions and their gradient
    e·V·H                         the gradient of the head's weight that earlier chunks left, if there are any
    """
    chunk = min(batch.trained, chunk_tokens)
    earlier = element * decoder.embedding if trained and batch.trained > chunk_tokens else 0
    return 3 * chunk * decoder.vocabulary * FLOAT + 2 * element * batch.trained * decoder.hidden + earlier


def layer_backward_bytes(decoder: Decoder, batch: MicroBatch, element: int, *, trained: bool = True) -> int:
    """The first layer that backward comes to, in its MLP, beyond what forward kept.

    Gradients of the product, of act(gate) and of up, less the product, which is no longer needed: 2F a token; the
    residual's gradient and the layer's own: 2H; and, where these are ``trained``, the gradient of the down projection,
    H·F, and of the head, V·H.
    """
    a_token = 2 * decoder.ffn + 2 * decoder.hidden
    weights = decoder.hidden * decoder.ffn + decoder.embedding if trained else 0
    return element * (batch.tokens * a_token + weights)


def embedding_backward_bytes(decoder: Decoder, element: int) -> int:
    """The end of backward: the gradient of the embedding is as large as the embedding, however few tokens there were.

    A tied one gets two of them, from head and embedding, and their sum: three until that is done. (That it is three was
    concluded from the measured peak at the end of backward.)
    """
    return element * decoder.embedding * (3 if decoder.tied else 1)


def merging_bytes(decoder: Decoder, element: int) -> int:
    """An adapted layer on its way to the sampler, W + s·B·A in fp32: B·A and its multiple, or that and the sum; W too.

    In float32 W is there already.
    """
    return FLOAT * decoder.hidden * decoder.ffn * (2 if element == FLOAT else 3)


# --- the sampler


def cache_bytes(decoder: Decoder, *, requests: int, length: int, element: int) -> int:
    """Keys and values of every token of every request; one layer is there twice while a token is appended to it."""
    a_layer = 2 * decoder.keys * element * requests * length
    return a_layer * (decoder.layers + 1)


def prefill_bytes(decoder: Decoder, *, requests: int, length: int, element: int) -> int:
    """The prompts' forward pass in one layer, nothing kept: residual, its norm, gate, up and their product; the mask.

    Prompts of different lengths are padded, which makes a mask of every pair, as booleans and, within SDPA, in e.
    """
    tokens = requests * length
    return element * tokens * (2 * decoder.hidden + 3 * decoder.ffn) + (BOOL + element) * tokens * length


def decoding_bytes(decoder: Decoder, *, requests: int, element: int) -> int:
    """The logits of one step while tokens are drawn, a request and word: 24 + e.

    The model's own (e), a copy in fp32 (4), log-probabilities (4), probabilities and their cumulative sum in double (8
    each).
    """
    return requests * decoder.vocabulary * (element + 2 * FLOAT + 16)


def shard_of(decoder: Decoder, ranks: int) -> Decoder:
    """What one of ``ranks`` that share vLLM's copy of a model computes: its heads and its part of every MLP.

    Fewer key heads than ranks are repeated. The residual stream and the logits are whole on every rank.
    """
    heads, kv_heads, ffn = decoder.heads // ranks, max(1, decoder.kv_heads // ranks), -(-decoder.ffn // ranks)
    return replace(decoder, heads=heads, kv_heads=kv_heads, ffn=ffn)


def paged_cache_bytes(decoder: Decoder, *, requests: int, length: int, element: int) -> int:
    """Keys and values of vLLM, whose pages lie in place while they fill."""
    return 2 * decoder.keys * element * decoder.layers * requests * length


def sampling_step_bytes(decoder: Decoder, *, tokens: int, requests: int, element: int) -> int:
    """A step of vLLM at its largest: so many tokens in one layer, and the logits of so many requests.

    tokens     residual, its norm, gate, up and their product
    requests   logits as the head leaves them (e), in fp32 (4), log-probabilities (4)
    """
    return element * tokens * (2 * decoder.hidden + 3 * decoder.ffn) + requests * decoder.vocabulary * (
        element + 2 * FLOAT
    )
