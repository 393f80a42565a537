"""The formulas of ``memory``: by hand where numbers are small, against torch's own saved tensors where they are not."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from packed import collate
from token_columns import marked
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from condensegrpo.algorithms.objective import MicroBatchLoss, PerToken, supervised
from condensegrpo.learner import head as fused_head
from condensegrpo.learner.head import ChunkedHead
from condensegrpo.learner.layers import checkpoint_layers, compile_layers
from condensegrpo.learner.logprobs import CPU
from condensegrpo.learner.lora import add_adapters
from condensegrpo.learner.settings import LoraSettings
from condensegrpo.learner.tree_attention import Paths, paths, use_tree_attention
from condensegrpo.planning.formulas import (
    Branch,
    Decoder,
    Gathered,
    MicroBatch,
    Tower,
    Weights,
    activation_bytes,
    cache_bytes,
    chunked_head_bytes,
    decoding_bytes,
    eager_bytes,
    embedding_backward_bytes,
    ends_bytes,
    gathered,
    head_bytes,
    layer_backward_bytes,
    layer_bytes,
    merging_bytes,
    norm_bytes,
    paths_bytes,
    pixels_bytes,
    prefill_bytes,
    tower_bytes,
    tower_layer_bytes,
)

SIZES = {
    "vocab_size": 64,
    "hidden_size": 48,
    "intermediate_size": 112,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}
DTYPES = (torch.float32, torch.bfloat16)


def decoder(*, layers: int = 1, head_size: int = 8, kv_heads: int = 2, normed: bool = False) -> Decoder:
    return Decoder(
        hidden=48,
        layers=layers,
        heads=6,
        kv_heads=kv_heads,
        head_size=head_size,
        ffn=112,
        vocabulary=64,
        normed_heads=normed,
        tied=True,
    )


def model(kind: str, dtype: torch.dtype, *, layers: int, attention: str = "sdpa", **more: int) -> PreTrainedModel:
    config = AutoConfig.for_model(kind, **{**SIZES, **more}, num_hidden_layers=layers)
    return AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=attention).eval()


@contextmanager
def kept_tensors(model: PreTrainedModel) -> Iterator[dict[int, Tensor]]:
    """What autograd keeps for backward by its storage, without parameters and buffers; held, so that no two share."""
    own = {tensor.untyped_storage().data_ptr() for tensor in (*model.parameters(), *model.buffers())}
    kept: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        place = tensor.untyped_storage().data_ptr()
        if place not in own:
            kept[place] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        yield kept


def kept_bytes(model: PreTrainedModel, rows: int, length: int, position_ids: Tensor | None = None) -> int:
    """Bytes that the decoder's forward pass keeps."""
    ids = torch.zeros(rows, length, dtype=torch.long)
    places = torch.arange(length).expand(rows, length).contiguous() if position_ids is None else position_ids
    with kept_tensors(model) as kept:
        output = model.get_decoder()(input_ids=ids, position_ids=places, attention_mask=None, use_cache=False)
    assert output.last_hidden_state.requires_grad
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())


# --- by hand


def test_a_norm_by_hand() -> None:
    """float32: x, x̂ and y of 4 bytes; bfloat16: x of 4, the others of 2; and 1/rms of 4."""
    assert norm_bytes(10, 4) == 124
    assert norm_bytes(10, 2) == 84


def test_a_llama_layer_by_hand() -> None:
    """Two norms 2·(12·48 + 4); q 48, k 16, v 16, output 48 of 4 bytes; 6 sums of 4; the MLP 4·112 of 4."""
    assert layer_bytes(decoder(), 4) == 1160 + 512 + 24 + 1792


def test_norms_of_queries_and_keys_by_hand() -> None:
    """x and x̂ of 48 queries and 16 keys, and 1/rms of 6 + 2 heads."""
    plain, normed = layer_bytes(decoder(), 4), layer_bytes(decoder(normed=True), 4)
    assert normed - plain == 8 * 64 + 4 * 8


def test_the_head_by_hand() -> None:
    """10 trained tokens in chunks of 4: 3·4·64 fp32 numbers, hidden states 10·48 twice, and a gradient of 64·48."""
    batch = MicroBatch(tokens=40, length=20, trained=10)
    assert chunked_head_bytes(decoder(), batch, chunk_tokens=4, element=4) == 3072 + 3840 + 12288
    assert chunked_head_bytes(decoder(), batch, chunk_tokens=10, element=4) == 7680 + 3840
    assert chunked_head_bytes(decoder(), batch, chunk_tokens=4, element=4, trained=False) == 3072 + 3840


def test_the_one_pass_head_by_hand() -> None:
    """10 trained tokens in tiles of 4: 4·64 numbers of 4 bytes, or of 2 + 4 + 2; 10·48 twice; 64·48 of 4, or 4 + 2."""
    batch = MicroBatch(tokens=40, length=20, trained=10)
    assert head_bytes(decoder(), batch, tile=4, element=4) == 1024 + 3840 + 12288
    assert head_bytes(decoder(), batch, tile=4, element=2) == 2048 + 1920 + 18432
    assert head_bytes(decoder(), batch, tile=99, element=4, trained=False) == 2560 + 3840


def test_frozen_layers_have_no_gradients_on_their_way() -> None:
    batch = MicroBatch(tokens=10, length=10, trained=1)
    whole, frozen = (layer_backward_bytes(decoder(), batch, 4, trained=trained) for trained in (True, False))
    assert frozen == 4 * 10 * (2 * 112 + 2 * 48)
    assert whole - frozen == 4 * (48 * 112 + 64 * 48)


def test_merging_by_hand() -> None:
    assert merging_bytes(decoder(), 4) == 2 * 4 * 48 * 112
    assert merging_bytes(decoder(), 2) == 3 * 4 * 48 * 112


def test_the_embedding_s_gradient_is_there_three_times_where_it_is_tied() -> None:
    untied = Decoder(
        hidden=3, layers=1, heads=1, kv_heads=1, head_size=3, ffn=5, vocabulary=7, normed_heads=False, tied=False
    )
    assert embedding_backward_bytes(untied, 4) == 84
    assert embedding_backward_bytes(decoder(), 4) == 3 * 4 * 64 * 48


def test_the_cache_by_hand() -> None:
    """2 layers, and one again, of keys and values of 2·8, for 3 requests of 10 tokens in 2 bytes."""
    assert cache_bytes(decoder(layers=2), requests=3, length=10, element=2) == 3 * 2 * 16 * 3 * 10 * 2


def test_prompts_and_logits_by_hand() -> None:
    assert prefill_bytes(decoder(), requests=2, length=5, element=4) == 4 * 10 * (96 + 336) + 5 * 10 * 5
    assert decoding_bytes(decoder(), requests=2, element=2) == 2 * 64 * 26


def test_all_weights_are_counted() -> None:
    assert Weights(trainable=10, frozen=5, element=2).bytes == 30


# --- against torch


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("kind", "more", "sizes"),
    [
        ("llama", {}, decoder(layers=2)),
        ("mistral", {"head_dim": 8}, decoder(layers=2)),
        ("qwen2", {}, decoder(layers=2)),
        ("qwen3", {"head_dim": 16}, decoder(layers=2, head_size=16, normed=True)),
        ("qwen3", {"head_dim": 8, "num_key_value_heads": 6}, decoder(layers=2, kv_heads=6, normed=True)),
    ],
)
def test_activations_are_what_autograd_keeps(
    kind: str, more: dict[str, int], sizes: Decoder, dtype: torch.dtype
) -> None:
    found = kept_bytes(model(kind, dtype, layers=2, **more), 4, 32)
    assert found == activation_bytes(sizes, MicroBatch(tokens=128, length=32, trained=0), dtype.itemsize)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # the learner does not show it either
@pytest.mark.parametrize(("layers", "adapters"), [(2, 0), (1, 7)])
def test_compiled_layers_keep_what_the_partitioner_does_not_compute_again(layers: int, adapters: int) -> None:
    """With adapters in one layer alone: each layer is compiled again, which takes seconds."""
    policy = model("qwen3", torch.bfloat16, layers=layers, head_dim=8)
    if adapters:
        lora = LoraSettings(rank=4, alpha=8.0, dropout=0.0, targets="all-linear")
        add_adapters(policy, lora, base="base", seed=0)
    torch._dynamo.reset()
    compile_layers(policy, backend="aot_eager")  # which divides forward and backward as inductor does
    sizes, batch = decoder(layers=layers, normed=True), MicroBatch(tokens=128, length=32, trained=0)
    scales = 4 * adapters  # a number in fp32 of each adapter
    assert kept_bytes(policy, 4, 32) == activation_bytes(sizes, batch, 2, width=4 * adapters, compiled=True) + scales


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("kind", "kv_heads"), [("llama", 2), ("qwen3", 6)])
@pytest.mark.parametrize("lengths", [(200,), (130, 130), (16,), (300, 40, 7)])
def test_attention_along_paths_keeps_pieces_and_their_masks(
    kind: str, kv_heads: int, lengths: tuple[int, ...], dtype: torch.dtype
) -> None:
    sizes = decoder(layers=2, kv_heads=kv_heads, normed=kind == "qwen3")
    pattern, depth = laid_out(lengths)
    policy = model(kind, dtype, layers=2, head_dim=8, num_key_value_heads=kv_heads)
    batch = MicroBatch(tokens=sum(lengths), length=max(lengths), trained=0)
    element = dtype.itemsize
    predicted = activation_bytes(sizes, batch, element) + paths_bytes(sizes, batch, bucket_sizes(pattern), element)
    assert kept_along(policy, pattern, depth) == predicted


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_adapters_keep_their_ranks_and_spare_what_frozen_norms_need(kind: str, dtype: torch.dtype) -> None:
    policy = model(kind, dtype, layers=3, head_dim=8)
    lora = LoraSettings(rank=4, alpha=8.0, dropout=0.0, targets="all-linear")
    add_adapters(policy, lora, base="base", seed=0)
    pattern, depth = laid_out((200, 50))
    sizes, batch = decoder(layers=3, normed=kind == "qwen3"), MicroBatch(tokens=250, length=200, trained=0)
    element = dtype.itemsize
    predicted = activation_bytes(sizes, batch, element, width=4 * 7 * 3)
    assert kept_along(policy, pattern, depth) == predicted + paths_bytes(sizes, batch, bucket_sizes(pattern), element)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("adapted", "count"), [(0, 1), (0, 3), (4 * 7 * 3, 2), (4 * 7 * 3, 3)])
def test_checkpointed_layers_keep_their_inputs(adapted: int, count: int, dtype: torch.dtype) -> None:
    """Of cosine and sine, which the layers' closures hold, no hook sees anything where all layers are checkpointed."""
    policy = model("qwen3", dtype, layers=3, head_dim=8)
    if adapted:
        lora = LoraSettings(rank=4, alpha=8.0, dropout=0.0, targets="all-linear")
        add_adapters(policy, lora, base="base", seed=0)
    checkpoint_layers(policy, count)
    sizes, batch, element = decoder(layers=3, normed=True), MicroBatch(tokens=64, length=64, trained=0), dtype.itemsize
    unseen = 64 * 2 * 8 * element if count == 3 else 0
    predicted = activation_bytes(sizes, batch, element, width=adapted, checkpointed=count)
    assert kept_bytes(policy, 1, 64) == predicted - unseen


def test_paths_by_hand() -> None:
    """10 queries of 48, twice, and 10 in place; keys and values of 20·16; 3 heads that share 100 pairs; 6 logs of 10.

    Less plain attention's 2·(48 + 16) numbers and 6 logs of 10 tokens.
    Once: 100 booleans, 10 depths and 10 + 20 + 10 indices.
    """
    batch = MicroBatch(tokens=10, length=10, trained=0)
    a_layer = 4 * (48 * 30 + 2 * 16 * 20 + 3 * 100) + 4 * 60 - 10 * (4 * 128 + 24)
    assert paths_bytes(decoder(), batch, Gathered(queries=10, keys=20, pairs=100), 4) == 100 + 8 * 50 + a_layer


def laid_out(lengths: tuple[int, ...]) -> tuple[Paths, Tensor]:
    """Rows behind each other that share nothing, and the depths of their tokens."""
    depth = torch.cat([torch.arange(length) for length in lengths])
    return paths(depth.tolist()).on(CPU), depth


def bucket_sizes(pattern: Paths) -> Gathered:
    return Gathered(
        queries=pattern.queries.numel(),
        keys=pattern.keys.numel(),
        pairs=sum(one.visible.numel() for one in pattern.buckets),
    )


def kept_along(policy: PreTrainedModel, pattern: Paths, depth: Tensor) -> int:
    """Bytes that the decoder's forward pass keeps along paths, which themselves stay as long."""
    assert use_tree_attention(policy)
    own = [*(bucket.visible for bucket in pattern.buckets), pattern.indices]
    places = {tensor.untyped_storage().data_ptr() for tensor in own}
    with kept_tensors(policy) as kept:
        policy.get_decoder()(
            input_ids=torch.zeros(1, len(depth), dtype=torch.long),
            position_ids=depth[None],
            attention_mask=torch.ones(1, 1, 1, 1, dtype=torch.bool),
            use_cache=False,
            pattern=pattern,
        )
    forward = sum(tensor.untyped_storage().nbytes() for place, tensor in kept.items() if place not in places)
    return forward + sum(tensor.numel() * tensor.element_size() for tensor in own)


@settings(max_examples=60)
@given(branches=st.lists(st.tuples(st.floats(0, 1), st.integers(1, 500)), min_size=1, max_size=6))
def test_gathered_sizes_are_those_of_the_buckets(branches: list[tuple[float, int]]) -> None:
    """Of trees whose branches leave the path before them anywhere, its last token left out."""
    depths: list[int] = []
    sizes = []
    for share, length in branches:
        above = int(share * depths[-1]) if depths else 0
        depths += range(above, above + length)
        sizes.append(Branch(above=above, length=length))
    assert gathered(sizes) == bucket_sizes(paths(depths).on(CPU))


def test_gathered_by_hand() -> None:
    """Pieces of 100 queries with 100 and 200 keys; two branches of 10 tokens below 90 join in one bucket."""
    assert gathered([Branch(above=0, length=200)]) == Gathered(queries=200, keys=300, pairs=30_000)
    assert gathered([Branch(above=90, length=10)] * 2) == Gathered(queries=20, keys=200, pairs=2000)


@pytest.mark.parametrize("dtype", DTYPES)
def test_eager_attention_keeps_every_pair(dtype: torch.dtype) -> None:
    sizes = decoder(layers=2)
    found = kept_bytes(model("llama", dtype, layers=2, attention="eager"), 2, 32)
    batch = MicroBatch(tokens=64, length=32, trained=0)
    mask = dtype.itemsize * 32 * 32  # added to the pairs, not kept for backward
    assert found == activation_bytes(sizes, batch, dtype.itemsize) + eager_bytes(sizes, batch, dtype.itemsize) - mask


def test_sdpa_keeps_no_matrix_of_pairs() -> None:
    small, large = (kept_bytes(model("llama", torch.float32, layers=1), 1, length) for length in (32, 64))
    assert large == 2 * small


def test_the_head_keeps_nothing_of_a_chunk_that_it_can_compute_again() -> None:
    """So that the three tensors in ``chunked_head_bytes`` are those of one chunk, whatever the number of chunks."""
    head = ChunkedHead(torch.nn.Linear(8, 64, bias=False), softcap=None, vocabulary=64)
    head.chunk_tokens = 4
    hidden, target = torch.randn(12, 8, requires_grad=True), torch.zeros(12, dtype=torch.long)
    kept: list[int] = []

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        head(hidden, target, 1.0)
    assert max(kept, default=0) < 4 * 64


@pytest.mark.parametrize("trained", [True, False])
def test_the_one_pass_head_keeps_two_gradients_and_no_logits(trained: bool) -> None:
    hidden, weight = torch.randn(12, 8, requires_grad=True), torch.randn(64, 8).requires_grad_(trained)
    batch = collate([marked((1,) * 13, [False, *[True] * 12], logprob=0.0)])
    kept: list[int] = []

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        fused_head.summed(
            hidden, weight, batch.target, temperature=1.0, loss=MicroBatchLoss(PerToken(supervised), batch), tile=4
        )
    assert sorted(size for size in kept if size > 12) == ([12 * 8, 64 * 8] if trained else [12 * 8])


# --- what grows with what


@settings(max_examples=50)
@given(
    tokens=st.integers(1, 5000),
    more=st.integers(1, 5000),
    element=st.sampled_from((2, 4)),
    chunk=st.integers(1, 600),
)
def test_more_tokens_never_take_less(tokens: int, more: int, element: int, chunk: int) -> None:
    few = MicroBatch(tokens=tokens, length=1, trained=tokens)
    many = MicroBatch(tokens=tokens + more, length=1, trained=tokens + more)
    sizes = decoder()
    assert activation_bytes(sizes, few, element) < activation_bytes(sizes, many, element)
    assert head_bytes(sizes, few, tile=chunk, element=element) < head_bytes(sizes, many, tile=chunk, element=element)
    assert chunked_head_bytes(sizes, few, chunk_tokens=chunk, element=element) < chunked_head_bytes(
        sizes, many, chunk_tokens=chunk, element=element
    )
    assert layer_backward_bytes(sizes, few, element) < layer_backward_bytes(sizes, many, element)


def test_bfloat16_takes_more_than_half() -> None:
    """Norms compute in fp32 and keep their input so."""
    assert layer_bytes(decoder(), 4) / 2 < layer_bytes(decoder(), 2) < layer_bytes(decoder(), 4)
    assert ends_bytes(decoder(), 2) < ends_bytes(decoder(), 4)


def test_a_vision_tower_by_hand() -> None:
    """10 tokens of 4 patches of 6 numbers; layers of 8 channels, 2 heads and an MLP of 16, in bfloat16.

    A layer that trains keeps of a patch: two norms of (4 + 4)·8 + 4, attention 2·4·8 + 4·2, the MLP 2·4·16.
    """
    tower = Tower(hidden=8, layers=3, heads=2, ffn=16, parameters=0, patches=4, pixels=6)
    batch = MicroBatch(tokens=10, length=10, trained=1)
    layer = 40 * (2 * (8 * 8 + 4) + 72 + 128)
    assert pixels_bytes(tower, batch) == 40 * 6 * 4
    assert tower_layer_bytes(tower, batch, 2, trained=False) == 40 * 2 * (2 * 8 + 3 * 16)
    assert tower_layer_bytes(tower, batch, 2, trained=True) == layer
    assert tower_bytes(tower, batch, 2, checkpointed=False) == 3 * layer
    assert tower_bytes(tower, batch, 2, checkpointed=True) == 3 * 40 * 2 * 8
