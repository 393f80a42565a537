"""Seconds and bytes of servers, learner and weight transfer: pure formulas, and public figures of GPUs and models.

Peak arithmetic is dense bfloat16, as in NVIDIA's data sheets (nvidia.com/en-us/data-center: a100, h100, h200): A100
80GB SXM 312 TFLOP/s and 2039 GB/s, H100 SXM 989 TFLOP/s and 3350 GB/s, H200 SXM 989 TFLOP/s and 4800 GB/s. The network
is that of DGX machines, a port of 200 or 400 Gbit/s for each GPU. Models are Qwen2.5's (their ``config.json``).
"""

from dataclasses import dataclass
from functools import partial
from typing import Annotated

from annotated_types import Ge, Gt

from condensegrpo.config.yaml_tree import Section
from condensegrpo.planning.formulas import Decoder

BFLOAT16 = 2  # bytes
USABLE = 0.9  # of a GPU's memory for a server: vLLM's default of gpu_memory_utilization
RESERVED = 4e9  # bytes on each GPU of a server for activations and CUDA graphs


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """A GPU by its data sheet."""

    flops: float  # a second, dense bfloat16
    bandwidth: float  # bytes a second, of its memory
    memory: float  # bytes
    network: float  # bytes a second to GPUs of other machines


GPUS = {
    "A100": Gpu(flops=312e12, bandwidth=2.039e12, memory=80e9, network=25e9),
    "H100": Gpu(flops=989e12, bandwidth=3.35e12, memory=80e9, network=50e9),
    "H200": Gpu(flops=989e12, bandwidth=4.8e12, memory=141e9, network=50e9),
}


_qwen = partial(Decoder, head_size=128, normed_heads=False)
MODELS = {
    "1.5B": _qwen(hidden=1536, layers=28, heads=12, kv_heads=2, ffn=8960, vocabulary=151936, tied=True),
    "7B": _qwen(hidden=3584, layers=28, heads=28, kv_heads=4, ffn=18944, vocabulary=152064, tied=False),
    "32B": _qwen(hidden=5120, layers=64, heads=40, kv_heads=8, ffn=27648, vocabulary=152064, tied=False),
}


class ServerTimes(Section):
    """How long a server takes: one decoding step of B replies over C cached tokens, and one prompt.

    step      step_seconds + B·sequence_seconds + C·cached_token_seconds
    prompt    prompt_seconds + U·prompt_token_seconds + pairs·pair_seconds      U tokens that no cache has
    """

    step_seconds: Annotated[float, Gt(0)]
    """Of a decoding step, whatever its size: reading the weights, and overhead."""
    sequence_seconds: Annotated[float, Ge(0)] = 0.0
    """Of a decoding step, for each reply in it."""
    cached_token_seconds: Annotated[float, Ge(0)] = 0.0
    """Of a decoding step, for each token of keys and values that it reads."""
    prompt_seconds: Annotated[float, Ge(0)] = 0.0
    """Of a prompt, whatever its length."""
    prompt_token_seconds: Annotated[float, Ge(0)] = 0.0
    """Of a prompt, for each token that is not cached."""
    pair_seconds: Annotated[float, Ge(0)] = 0.0
    """Of a prompt, for each pair of a token that is not cached and a token that it sees."""
    kv_tokens: Annotated[int, Ge(1)] = 1_000_000
    """Tokens whose keys and values fit into memory."""
    sequences: Annotated[int, Ge(1)] = 256
    """Most replies at the same time (vLLM's max_num_seqs)."""
    block: Annotated[int, Ge(1)] = 16
    """Tokens of a block of the prefix cache."""


class Efficiency(Section):
    """What share of the data sheet is reached. Assumptions, to be replaced by figures of a first run."""

    learner: Annotated[float, Gt(0)] = 0.35
    """MFU of the learner's forward and backward."""
    prefill: Annotated[float, Gt(0)] = 0.5
    """MFU of reading prompts."""
    bandwidth: Annotated[float, Gt(0)] = 0.7
    """Share of the memory's bandwidth while decoding."""
    step_overhead: Annotated[float, Ge(0)] = 0.003
    """Seconds of a decoding step beside reading memory."""
    reply_overhead: Annotated[float, Ge(0)] = 0.0
    """Seconds of a decoding step for each reply in it, beside its arithmetic."""


def weights_of(model: Decoder) -> int:
    """Weights that multiply a token, in the decoder: q, k, v, o, gate, up, down."""
    return model.layers * model.hidden * (2 * model.queries + 2 * model.keys + 3 * model.ffn)


def weight_bytes(model: Decoder) -> int:
    """Of a copy in bfloat16, embedding and head included."""
    return BFLOAT16 * (weights_of(model) + (1 if model.tied else 2) * model.embedding)


def read_bytes(model: Decoder) -> int:
    """Weights that a decoding step reads; of an embedding that is no head, a row a token."""
    return weight_bytes(model) - (0 if model.tied else BFLOAT16 * model.embedding)


def prompt_flops(model: Decoder, tokens: int) -> float:
    """Floating-point operations of a prompt that no cache has, and of the logits of its last token."""
    pairs = tokens * (tokens + 1) // 2
    return 2.0 * (weights_of(model) * tokens + model.embedding) + 4.0 * model.layers * model.queries * pairs


def kv_bytes(model: Decoder) -> int:
    """Of a token's keys and values in bfloat16."""
    return BFLOAT16 * 2 * model.layers * model.keys


def server_times(gpu: Gpu, model: Decoder, efficiency: Efficiency, *, tensor_parallel: int) -> ServerTimes:
    """The times of a server by the roofline: decoding reads weights and keys and values, prompts are arithmetic.

    Example: 7B on an H100 reads 14.1 GB of weights at 0.7 · 3.35 TB/s: 6.0 ms a step, and 3 ms of overhead.
    """
    bandwidth = tensor_parallel * gpu.bandwidth * efficiency.bandwidth
    flops = tensor_parallel * gpu.flops * efficiency.prefill
    token = 2 * (weights_of(model) + model.embedding) / flops
    room = tensor_parallel * (USABLE * gpu.memory - RESERVED) - weight_bytes(model)  # 0 or less: they do not fit
    return ServerTimes(
        step_seconds=efficiency.step_overhead + read_bytes(model) / bandwidth,
        sequence_seconds=efficiency.reply_overhead + token,
        cached_token_seconds=kv_bytes(model) / bandwidth,
        prompt_token_seconds=2 * weights_of(model) / flops,
        pair_seconds=4 * model.layers * model.queries / flops,
        kv_tokens=int(room / kv_bytes(model)),
    )


def learning_flops(model: Decoder, *, tokens: int, pairs: int, trained: int, frozen: bool) -> float:
    """Floating-point operations of forward and backward, without recomputation.

        6·W·tokens + 12·layers·Q·pairs + 6·H·V·trained

    Frozen weights have no gradient: 4 in place of 6. What adapters add to that, a few percent, is left out.

    Args:
        tokens: of all rows, a shared prefix once.
        pairs: of a token and a token that it sees, itself included.
        trained: tokens that go through the LM head.
        frozen: adapters are trained, and nothing else.
    """
    dense = (4.0 if frozen else 6.0) * (weights_of(model) * tokens + model.embedding * trained)
    return dense + 12.0 * model.layers * model.queries * pairs
