"""How much of an update by adapters reaches the sampler; prints a table of docs/results.

    python benchmarks/adapter_rounding.py               # ten seconds

One linear layer with an adapter after one step of AdamW, which moves every entry of B by the learning rate. The base is
0.02·randn, rounded to bfloat16; A is as PEFT draws it; rank 16, alpha 32.
"""

import copy
from collections.abc import Sequence

import torch
from tables import show
from torch import Tensor
from transformers import PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from condensegrpo.learner.lora import adapted, add_adapters, merged_weight
from condensegrpo.learner.settings import LoraSettings

SIZES, RATES = (1024, 4096), (1e-6, 1e-5, 1e-4)
LORA = LoraSettings(rank=16, alpha=32.0, targets=("o_proj",))
SCALE = LORA.alpha / LORA.rank


def lost(effective: Tensor, exact: Tensor) -> float:
    """The share of x·ΔW that is lost, for random x: |x·(effective − exact)| / |x·exact|."""
    x = torch.randn(64, exact.shape[1], generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return float((x @ (effective.double() - exact).T).norm() / (x @ exact.T).norm())


def shares(policy: PreTrainedModel, *, scale: float) -> list[tuple[float, float, float]]:
    """What each adapted layer loses as native adapters in bfloat16, merged in bfloat16, and merged in fp32.

    Args:
        policy: in fp32, with adapters; the weights of its base are exact in bfloat16.
        scale: alpha/rank.
    """
    rounded = copy.deepcopy(policy).bfloat16()
    rows = []
    for part, low in zip(policy.modules(), rounded.modules(), strict=True):
        layer, short = adapted(part), adapted(low)
        if layer is None or short is None:
            continue
        weight = layer.weight.detach().double()
        exact, native = (scale * (each.b.double() @ each.a.double()).detach() for each in (layer, short))
        low_bits, full = (merged_weight(each).double() - weight for each in (low, part))
        rows.append((lost(native, exact), lost(low_bits, exact), lost(full, exact)))
    return rows


def take_step(policy: PreTrainedModel, *, rate: float) -> None:
    """Give the bases weights of the usual size, and every entry of B what one step of AdamW gives it."""
    draw = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for layer in filter(None, map(adapted, policy.modules())):
            layer.weight.copy_((0.02 * torch.randn(layer.weight.shape, generator=draw)).bfloat16())
            layer.b.copy_(rate * torch.randn(layer.b.shape, generator=draw).sign())


def _policy(size: int) -> PreTrainedModel:
    config = Qwen3Config(
        vocab_size=64, hidden_size=size, intermediate_size=64, num_hidden_layers=1,
        num_attention_heads=size // 64, num_key_value_heads=1, head_dim=64,
    )  # fmt: skip
    return add_adapters(Qwen3ForCausalLM(config), LORA, base="any", seed=0)


def main(sizes: Sequence[int] = SIZES, rates: Sequence[float] = RATES) -> None:
    """Print the table."""
    lines = []
    for size in sizes:
        policy = _policy(size)
        for rate in rates:
            take_step(policy, rate=rate)
            ((native, low, full),) = shares(policy, scale=SCALE)
            lines.append((f"{size} × {size}", f"{rate:g}", f"{native:.1g}", f"{low:.3f}", f"{full:.5f}"))
    heads = ("layer", "learning rate", "native, A and B in bfloat16", "merged in bfloat16", "merged in fp32")
    show("", heads, lines)


if __name__ == "__main__":
    main()
