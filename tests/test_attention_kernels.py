"""Attention kernels of GPUs, emulated on a CPU: they compute what pieces of SDPA compute, and the log names them."""

from collections.abc import Callable, Sequence
from itertools import pairwise
from math import inf

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from packed import computed
from tiny import forking_rows, llama, plain_logprobs, qwen3
from torch import Tensor
from torch._dynamo import config as dynamo_config
from torch._dynamo.utils import counters
from torch.nn.attention import flex_attention as torch_flex
from torch.nn.attention.flex_attention import BlockMask, create_block_mask
from torch.nn.functional import scaled_dot_product_attention
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import modeling_flash_attention_utils as transformers_flash

from condensegrpo.algorithms.packing import lay_out
from condensegrpo.algorithms.prefix_tree import tree
from condensegrpo.assembly.build import build
from condensegrpo.assembly.preflight import check_run
from condensegrpo.config.load import named_config
from condensegrpo.core.errors import ConfigError, LearnerError
from condensegrpo.learner.attention_kernels import (
    PROBE_DEPTHS,
    Heads,
    Kernels,
    agreed,
    check_attention,
    describe_choice,
    kernel_error,
    kernel_fault,
    kernels_on,
    why_not,
)
from condensegrpo.learner.layers import compile_layers
from condensegrpo.learner.logprobs import TrainedLogprobs
from condensegrpo.learner.tree_attention import HostPattern, Paths, paths, pattern_attention
from condensegrpo.learner.tree_kernels import (
    BLOCK,
    Branches,
    Intervals,
    block_mask,
    branch_pattern,
    compiled_flex,
    ends,
    gathered_keys,
    intervals,
)

EXAMPLE = [[1, 2, 3, 4], [1, 2, 3, 5], [1, 6]]
ROWS = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=7), min_size=1, max_size=9)  # much is shared
CPU = torch.device("cpu")


def flex(query: Tensor, key: Tensor, value: Tensor, *, block_mask: BlockMask, scale: float, enable_gqa: bool) -> Tensor:
    """torch's own computation of flex_attention behind the check that refuses gradients on a CPU."""
    assert enable_gqa
    options = torch_flex._apply_kernel_options(query, key, value, False, None)
    mask = block_mask.as_tuple()
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    return torch_flex.flex_attention_hop(query, key, value, torch_flex._identity, mask, scale, options)[0]


def varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    softmax_scale: float,
    causal: bool,
) -> Tensor:
    """flash-attention's function by its documentation: causal from the bottom right, sequence by sequence."""
    assert causal
    assert cu_seqlens_q.dtype == cu_seqlens_k.dtype == torch.int32
    assert (int(cu_seqlens_q[-1]), int(cu_seqlens_k[-1]), len(v)) == (len(q), len(k), len(k))
    assert (max_seqlen_q, max_seqlen_k) == (int(cu_seqlens_q.diff().max()), int(cu_seqlens_k.diff().max()))
    sharing, outputs = q.shape[1] // k.shape[1], []
    sequences = (pairwise(each.tolist()) for each in (cu_seqlens_q, cu_seqlens_k))
    for (first_q, end_q), (first_k, end_k) in zip(*sequences, strict=True):
        query = q[first_q:end_q].transpose(0, 1)
        key, value = (each[first_k:end_k].repeat_interleave(sharing, dim=1).transpose(0, 1) for each in (k, v))
        count, keys = end_q - first_q, end_k - first_k
        sees = torch.ones(count, keys, dtype=torch.bool).tril(keys - count)
        outputs.append(scaled_dot_product_attention(query, key, value, attn_mask=sees, scale=softmax_scale))
    return torch.cat(outputs, dim=1).transpose(0, 1)


MAKERS: dict[str, Callable[[Sequence[int]], HostPattern]] = {
    "flex": lambda depths: intervals(depths, flex),
    "flash": lambda depths: branch_pattern(depths, varlen),
}
KERNELS = {"flex": Kernels("", flex=flex), "flash": Kernels("", varlen=varlen, max_keys=inf)}


def test_the_example_of_the_docstrings() -> None:
    depths = tree(EXAMPLE).positions
    assert depths == (0, 1, 2, 3, 3, 1)
    assert ends(depths) == [6, 5, 5, 4, 5, 6]
    found = branch_pattern(depths, varlen).on(CPU)
    assert found.keys.tolist() == [0, 1, 2, 3, 0, 1, 2, 4, 0, 5]
    assert (found.query_starts.tolist(), found.key_starts.tolist()) == ([0, 4, 5, 6], [0, 4, 8, 10])
    assert (found.longest, gathered_keys(depths)) == ((4, 4), 10)


@settings(max_examples=200)
@given(ROWS)
def test_a_token_sees_its_own_row_up_to_itself_and_no_other(rows: list[list[int]]) -> None:
    laid_out = tree(rows)
    end = ends(laid_out.positions)
    for places in laid_out.indices:
        for depth, query in enumerate(places):
            assert [key for key in range(len(end)) if key <= query < end[key]] == list(places[: depth + 1])


def random_rows(seed: int, *, tokens: int) -> list[list[int]]:
    """Rows that share prefixes of all lengths, of about as many different tokens."""
    draw, rows, left = torch.Generator().manual_seed(seed), [[0] * 270], tokens - 270
    while left > 0:
        above, length = (int(torch.randint(most, (), generator=draw)) for most in (len(rows[-1]), 150))
        rows.append([*rows[-1][:above], *[len(rows)] * (length + 1)])
        left -= length + 1
    return rows


@pytest.mark.parametrize("seed", range(6))
def test_the_blocks_are_those_that_torch_finds_among_all_pairs(seed: int) -> None:
    depths = list(tree(random_rows(seed, tokens=900)).positions)
    depths += [0] * (-len(depths) % BLOCK)
    found = block_mask(torch.tensor(ends(depths), dtype=torch.int32))
    wanted = create_block_mask(found.mask_mod, None, None, len(depths), len(depths), device="cpu")
    for name in ("kv_num_blocks", "full_kv_num_blocks", "q_num_blocks", "full_q_num_blocks"):
        torch.testing.assert_close(getattr(found, name), getattr(wanted, name), rtol=0, atol=0)
    torch.testing.assert_close(found.to_dense(), wanted.to_dense(), rtol=0, atol=0)
    assert found.full_kv_num_blocks.sum() > 0


class Largest(TorchDispatchMode):
    """Records the largest tensor that an operation makes."""

    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # noqa: ANN001, ANN204  torch's signature has no types
        found = func(*args, **(kwargs or {}))
        made = found if isinstance(found, (tuple, list)) else [found]
        self.numel = max([self.numel, *[each.numel() for each in made if isinstance(each, Tensor)]])
        return found


def test_nothing_of_all_pairs_is_made() -> None:
    with Largest() as largest:
        made = intervals(range(8192), flex)
        made.on(CPU)
    assert made.tokens == 8192
    assert largest.numel == max(8192, (8192 // BLOCK) ** 2)


@pytest.mark.parametrize("kernel", MAKERS)
@pytest.mark.parametrize("heads", [(4, 4, 8), (4, 2, 16), (3, 1, 24), (14, 2, 16)])
def test_outputs_and_gradients_are_those_of_pieces(kernel: str, heads: tuple[int, int, int]) -> None:
    queries, keys, size = heads
    depths = list(tree(random_rows(queries, tokens=300)).positions)
    depths += [0] * (-len(depths) % BLOCK)
    draw = torch.Generator().manual_seed(queries)
    made = [
        torch.randn(1, count, len(depths), size, generator=draw, dtype=torch.float64) for count in (queries, keys, keys)
    ]
    weight = torch.randn(1, len(depths), queries, size, generator=draw, dtype=torch.float64)
    inputs = [each.requires_grad_() for each in made]
    patterns = (make(depths).on(CPU) for make in (MAKERS[kernel], paths))
    found, wanted = (pattern.attend(*inputs, scaling=0.3) for pattern in patterns)
    torch.testing.assert_close(found, wanted)
    gradients = [torch.autograd.grad((each * weight).sum(), inputs) for each in (found, wanted)]
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other)


class Emulated(TrainedLogprobs):
    """Computes with a given kernel on a CPU."""

    chosen = Kernels("")

    def kernels(self, device: torch.device) -> Kernels:
        return self.chosen


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("make", [qwen3, llama])
def test_a_model_gives_what_its_rows_give_apart(kernel: str, make: Callable[[], TrainedLogprobs]) -> None:
    model, rows = make(), forking_rows(12, seed=1)
    module = Emulated(model)
    module.chosen = KERNELS[kernel]
    module.check()
    assert module.computes_trees
    wanted = torch.cat([plain_logprobs(model, row) for row in rows])
    found = computed(module, lay_out([tuple(rows[:7]), *[(row,) for row in rows[7:]]]), 1.0)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
    for name, tensor in model.named_parameters():
        one, other = (
            torch.autograd.grad(each.square().sum(), tensor, retain_graph=True)[0] for each in (found, wanted)
        )
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4 * float(other.abs().max()), msg=name)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
def test_compiled_layers_hold_flex_in_their_graph() -> None:
    torch._dynamo.reset()
    counters.clear()
    plain, compiled, graphs = TrainedLogprobs(qwen3()), Emulated(qwen3()), []
    compiled.chosen = KERNELS["flex"]
    compile_layers(compiled.policy, backend="eager")
    rows = forking_rows(90, seed=3)
    lengths = []
    for batch in (lay_out([tuple(rows[:9])]), lay_out([(row,) for row in rows]), lay_out([tuple(rows[:40])])):
        for module in (plain, compiled):
            computed(module, batch, 1.0).square().sum().backward()
        lengths.append(compiled.place(batch).token_ids.numel())
        graphs.append(counters["stats"]["unique_graphs"])
    assert len(set(lengths)) > 1
    assert len(set(graphs)) == 1
    assert not counters["graph_break"]
    for expected, found in zip(plain.parameters(), compiled.parameters(), strict=True):
        torch.testing.assert_close(found.grad, expected.grad, rtol=1e-4, atol=1e-4 * float(expected.grad.abs().max()))


@pytest.mark.parametrize("count", [1, 9])
def test_transformers_flash_attention_keeps_rows_in_line_apart(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a model that computes no trees takes on a GPU: plain rows behind each other, told apart by positions."""
    monkeypatch.setattr(transformers_flash, "_loaded_implementation", "flash_attention_2")
    monkeypatch.setattr(transformers_flash, "_flash_varlen_fn", varlen)
    monkeypatch.setattr(transformers_flash, "_flash_fn", lambda q, k, v, **_: one_sequence(q, k, v))
    processing = transformers_flash._lazy_define_process_function(varlen)
    monkeypatch.setattr(transformers_flash, "_process_flash_kwargs_fn", processing)
    model, rows = qwen3(), forking_rows(count, seed=2)
    wanted = torch.cat([plain_logprobs(model, row) for row in rows])
    model.config._attn_implementation = "flash_attention_2"
    module = TrainedLogprobs(model)
    assert module.separates_rows_by_position
    assert "flash_attention_2 attention knows no trees" in module.describe(CPU)
    found = computed(module, lay_out([(row,) for row in rows]), 1.0)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)


def one_sequence(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """flash-attention's function for one sequence."""
    length = q.shape[1]
    bounds = torch.tensor([0, length], dtype=torch.int32)
    return varlen(
        q[0],
        k[0],
        v[0],
        cu_seqlens_q=bounds,
        cu_seqlens_k=bounds,
        max_seqlen_q=length,
        max_seqlen_k=length,
        softmax_scale=q.shape[-1] ** -0.5,
        causal=True,
    )[None]


def test_lengths_are_compiled_once() -> None:
    """At most once more, since 2 blocks are as many as there are key heads."""
    counters.clear()
    kernel = compiled_flex("eager")
    with torch.no_grad():
        for tokens in (3, 300, 500, 1100, 700, 130, 2000):
            made = intervals(range(tokens), kernel)
            query, key = (torch.randn(1, heads, made.tokens, 16) for heads in (4, 2))
            found = made.on(CPU).attend(query, key, key, scaling=None)[:, :tokens]
            query, key = query[:, :, :tokens], key[:, :, :tokens]
            torch.testing.assert_close(found, paths(range(tokens)).on(CPU).attend(query, key, key, scaling=None))
    assert counters["stats"]["unique_graphs"] <= 2


def test_a_micro_batch_that_shares_little_takes_flash_and_one_that_shares_much_takes_flex() -> None:
    both = Kernels("", flex=flex, varlen=varlen)
    much, little = [*range(100), *[100] * 3], [*range(100), *range(50, 100), *range(30)]
    assert [gathered_keys(each) / len(each) for each in (much, little)] == [303 / 103, 230 / 180]
    assert isinstance(both.pattern(much).on(CPU), Intervals)
    assert isinstance(both.pattern(little).on(CPU), Branches)
    assert isinstance(Kernels("", varlen=varlen).pattern(much).on(CPU), Paths)
    assert isinstance(KERNELS["flash"].pattern(much).on(CPU), Branches)  # chosen by name


def test_on_a_cpu_it_is_sdpa_whatever_is_wanted_and_the_log_says_so() -> None:
    module = TrainedLogprobs(qwen3())
    assert module.describe(CPU) == "attention kernel: sdpa"
    assert isinstance(module.kernels(CPU).pattern(range(3)).on(CPU), Paths)
    module.why_plain_rows = "it looks back by place"
    assert module.describe(CPU) == (
        "attention kernel: sdpa; prefixes that rows share are computed once for every row: it looks back by place"
    )


def test_a_kernel_that_computes_something_else_is_told_by_its_difference() -> None:
    def sees_all_before(depths: Sequence[int]) -> HostPattern:
        return intervals(range(len(depths)), flex)

    heads = Heads(queries=4, keys=2, size=16)
    assert len(PROBE_DEPTHS) % BLOCK == 0
    for make in MAKERS.values():
        assert kernel_error(make, heads, torch.float32, CPU) < 1e-5
        assert kernel_error(make, heads, torch.bfloat16, CPU) < 4 * torch.finfo(torch.bfloat16).eps
    assert kernel_error(sees_all_before, heads, torch.float32, CPU) > 0.1


def test_a_kernel_that_fails_on_one_rank_is_used_on_none() -> None:
    assert agreed([{"flash": None, "flex": None}, {"flash": "no such device", "flex": None}]) == {
        "flash": "no such device (rank 1)",
        "flex": None,
    }


@pytest.mark.parametrize(
    ("faults", "wanted"),
    [
        ({"flash": None, "flex": None}, "flash up to 2 gathered keys a token, flex beyond"),
        ({"flash": "it is not there", "flex": None}, "flex; flash is not used: it is not there"),
        (
            {"flash": None, "flex": "no triton"},
            "flash up to 2 gathered keys a token, sdpa beyond; flex is not used: no triton",
        ),
        ({"flash": "a", "flex": "b"}, "sdpa; flash is not used: a; flex is not used: b"),
    ],
)
def test_the_log_says_what_is_used_on_a_gpu_and_what_is_not(faults: dict[str, str | None], wanted: str) -> None:
    assert describe_choice("auto", faults) == f"attention kernel: {wanted}"


def test_what_a_gpu_lacks_for_a_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert why_not("flash", "float32") == "it computes bfloat16, and model.dtype is float32"
    assert why_not("flash", "bfloat16") == ("neither flash-attn nor kernels is installed (pip install -e '.[kernels]')")
    with dynamo_config.patch(disable=True):  # monkeypatch would delete the setting when it undoes its change
        assert "TORCH_COMPILE_DISABLE" in str(why_not("flex", "float32"))


@pytest.mark.parametrize("kernel", ["flex", "flash"])
def test_a_kernel_that_cannot_run_is_reported_with_the_reason(kernel: str) -> None:
    fault = kernel_fault(kernel, Heads(queries=4, keys=2, size=16), torch.bfloat16, CPU)
    assert fault == "it runs on a GPU, and torch finds none"


def test_a_kernel_that_was_chosen_by_name_and_cannot_be_used_is_an_error() -> None:
    with pytest.raises(
        LearnerError, match=r"attention with flex on cuda:0: it runs on a GPU.* Set model.attention=auto"
    ):
        kernels_on("flex", Heads(queries=4, keys=2, size=16), torch.bfloat16, torch.device("cuda:0"))


@pytest.mark.parametrize("name", ["auto", "sdpa", "eager"])
def test_names_that_run_anywhere_are_accepted(name: str) -> None:
    check_attention(name, "float32")


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("flux", "there is no such kernel"),
        ("flex", "it runs on a GPU, and torch finds none"),
        ("flash_attention_2", "it runs on a GPU, and torch finds none"),
        ("kernels-community/flash-attn2", "it runs on a GPU, and torch finds none"),
    ],
)
def test_a_kernel_that_does_not_exist_or_cannot_run_here_is_refused_with_those_that_can(name: str, reason: str) -> None:
    with pytest.raises(ConfigError) as refused:
        check_attention(name, "bfloat16")
    assert str(refused.value) == (f"checking model.attention: found {name}; {reason}. Set one of auto, sdpa, eager.")


def test_a_dry_run_refuses_a_kernel_that_cannot_run() -> None:
    with pytest.raises(ConfigError, match=r"model\.attention: found flash; it runs on a GPU"):
        check_run(build(named_config("quickstart", ["model.attention=flash"])))


def test_dropout_of_attention_along_trees_is_refused() -> None:
    """A policy in evaluation mode asks for none."""
    query = torch.zeros(1, 2, 256, 4)
    with pytest.raises(LearnerError, match="Linear asks for dropout, wanted is plain attention"):
        pattern_attention(
            torch.nn.Linear(1, 1), query, query, query, None, pattern=paths(range(256)).on(CPU), dropout=0.1
        )
