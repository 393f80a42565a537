"""``condensegrpo plan``: parameters, memory beside measured peaks, tokens, advice; the command as a person calls it."""

import json
from math import ceil
from pathlib import Path

import pytest
import torch
from command import run, succeed
from hypothesis import given, settings
from hypothesis import strategies as st
from plan import CASES, configured
from tiny import llama, qwen3
from transformers import AutoConfig, GPT2Config, GPT2LMHeadModel

from condensegrpo.cli.configuration import parse_size
from condensegrpo.cli.doctor import USUAL
from condensegrpo.config.load import config_on, find_config, load_config, shipped, validate, vary
from condensegrpo.config.schema import ModelSettings, RunConfig
from condensegrpo.core.errors import ConfigError
from condensegrpo.learner.lora import add_adapters
from condensegrpo.learner.lora_targets import adapted_layers
from condensegrpo.learner.new_model import new_model, new_tokenizer
from condensegrpo.learner.settings import LoraSettings, NewModel
from condensegrpo.planning.plan import FILLED, MicroBatch, Plan, architecture, config_on_devices
from condensegrpo.planning.remedies import Overrides, advice, remedy

# 2 problems × 3 samples × 4 turns of at most 30 + 10 tokens: 24 rows of 40 tokens
TREE = {
    "model": {"new": {"vocab_size": 100, "hidden_size": 16, "layers": 2, "heads": 2, "ffn_size": 32}},
    "task": {"name": "ledger"},
    "rollout": {"limits": {"max_turns": 4, "max_context_tokens": 30, "max_output_tokens": 10}},
    "train": {"problems_per_step": 2, "samples_per_problem": 3, "steps": 5},
    "learner": {"tokens_per_micro_batch": 200},
    "evaluate": {"problems": 7},
}
CONFIG = validate(TREE, source="test")
WIDE = ("model.new.hidden_size=256", "model.new.vocab_size=1000")
SDPA = "model.attention=sdpa"
KEPT = "learner.checkpoint_activations=off"
FLASH = ("model.attention=flash_attention_2",)


def planned(*overrides: str, ranks: int = 1, config: RunConfig = CONFIG, memory: int | None = None) -> Plan:
    varied = vary(config, overrides)
    return Plan(varied, architecture(varied.model), ranks=ranks, device="gpu", memory=memory)


def part(found: Plan, phase: str, name: str) -> int:
    return found.phases[phase].get(name, 0)


# --- the model


@pytest.mark.parametrize("make", [qwen3, llama])
def test_parameters_are_those_of_the_real_model(make: object, tmp_path: Path) -> None:
    model = make()  # type: ignore[operator]  # one of two factories
    model.config.save_pretrained(tmp_path)  # config.json alone, no weights
    found = architecture(ModelSettings(path=str(tmp_path)))
    assert found.parameters == sum(tensor.numel() for tensor in model.parameters())
    assert found.tied == model.config.tie_word_embeddings
    assert found.known


def test_parameters_of_a_new_model_are_those_that_it_is_made_with() -> None:
    tokenizer = new_tokenizer(["a b c"], kind="words", vocab_size=64)
    new = NewModel(vocab_size=64, hidden_size=16, layers=2, heads=2, ffn_size=32)
    made = new_model(tokenizer, new, seed=0)
    unused = (64 - len(tokenizer)) * 16  # words that the text turned out not to have
    assert (
        architecture(ModelSettings(new=new)).parameters == sum(tensor.numel() for tensor in made.parameters()) + unused
    )


def test_a_new_model_by_hand() -> None:
    """100·16 embeddings, and a layer of 4·16² attention, 3·16·32 MLP, norms of 16, 16, 8 and 8; a last norm of 16."""
    assert architecture(CONFIG.model).parameters == 1600 + 2 * (1024 + 1536 + 48) + 16


def test_other_architectures_are_counted_exactly_and_their_activations_flagged(tmp_path: Path) -> None:
    config = GPT2Config(n_embd=16, n_layer=2, n_head=2, vocab_size=50, n_positions=32)
    config.save_pretrained(tmp_path)
    found = architecture(ModelSettings(path=str(tmp_path)))
    assert found.parameters == sum(tensor.numel() for tensor in GPT2LMHeadModel(config).parameters())
    assert (found.hidden, found.layers, found.ffn) == (16, 2, 64)
    notes = planned("model.new=null", f"model.path={tmp_path}").notes
    assert any("gpt2" in note for note in notes)


def test_a_model_of_a_hundred_billion_parameters_takes_neither_memory_nor_time(tmp_path: Path) -> None:
    AutoConfig.for_model(
        "llama",
        hidden_size=12288,
        intermediate_size=28672,
        num_hidden_layers=80,
        num_attention_heads=96,
        num_key_value_heads=8,
        vocab_size=128256,
    ).save_pretrained(tmp_path)
    found = architecture(ModelSettings(path=str(tmp_path)))
    by_hand = 2 * 128256 * 12288 + 80 * (2 * 12288**2 + 2 * 12288 * 1024 + 3 * 12288 * 28672 + 2 * 12288) + 12288
    assert found.parameters == by_hand


@pytest.mark.parametrize(
    "text", ["", "{}", "[]", '{"model_type": "llama", "hidden_size": -1}', '{"model_type": "vit"}']
)
def test_a_config_that_is_no_language_model_s_is_a_configuration_error(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ConfigError, match=r"model|config"):
        architecture(ModelSettings(path=str(tmp_path)))


def test_a_folder_that_is_not_there_is_a_configuration_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no folder"):
        architecture(ModelSettings(path=str(tmp_path / "none")))


# --- tokens and batches


def test_tokens_by_hand() -> None:
    """24 rows of 40; five fit into 200, which makes 5 micro-batches of 24 rows."""
    found = planned()
    assert found.tokens.step == 24 * 40
    assert found.tokens.trained == 24 * 10
    assert found.tokens.micro_batches == 5
    assert planned(ranks=2).tokens.micro_batches == 3


def test_the_largest_micro_batch_by_hand() -> None:
    """200 tokens in rows of 40, of which at most 39 can be trained: four turns of 10 that continue each other."""
    assert planned().batch == MicroBatch(tokens=200, length=40, trained=195)
    assert planned("rollout.limits.max_turns=1").batch == MicroBatch(tokens=200, length=40, trained=50)
    assert planned("learner.tokens_per_micro_batch=5000").batch.tokens == 24 * 40  # there are no more


def test_requests_are_trajectories_that_run_at_the_same_time() -> None:
    assert planned().requests == 7  # the evaluation has more than training
    assert planned("evaluate.problems=1").requests == 6
    assert planned("evaluate.problems=1", ranks=2).requests == 3
    assert planned("sampler.options.max_batch=2").requests == 2


def test_problems_that_do_not_divide_are_an_error() -> None:
    with pytest.raises(ConfigError, match=r"problems_per_step: found 2, which does not divide over 3 ranks"):
        planned(ranks=3)


@pytest.mark.parametrize("most", ["many", "0", "[3]"])
def test_a_batch_of_requests_that_is_no_number_is_an_error(most: str) -> None:
    with pytest.raises(ConfigError, match="wanted a number from 1 on"):
        planned(f"sampler.options.max_batch={most}")


def test_a_micro_batch_has_no_more_tokens_than_are_set() -> None:
    assert planned("learner.tokens_per_micro_batch=32").batch.tokens == 32


# --- memory


def test_what_is_there_while_learning_by_hand() -> None:
    """6832 parameters of 4 bytes: the sampler's, the learner's, two moments, gradients."""
    found = planned()
    weights = 4 * 6832
    assert part(found, "learning", "sampler: weights") == weights
    assert part(found, "learning", "weights") == weights
    assert part(found, "learning", "Adam's moments") == 2 * weights
    assert part(found, "learning", "gradients") == weights


@pytest.mark.parametrize(
    ("stage", "dtype", "masters", "moments", "gradients"),
    [  # bytes of a parameter on each of 2 ranks, without the bucket; a parameter is trained
        (0, "float32", 0, 8, 4),
        (0, "bfloat16", 2, 4, 4 + 2),
        (1, "float32", 2, 4, 4 + 4),
        (1, "bfloat16", 2, 4, 4 + 2),
        (2, "float32", 2, 4, 2 + 4),
        (2, "bfloat16", 2, 4, 2 + 2),
        (3, "bfloat16", 2, 4, 2 + 2),
    ],
)
def test_what_deepspeed_holds_of_a_parameter(
    stage: int, dtype: str, masters: int, moments: int, gradients: int
) -> None:
    """With a bucket of all parameters from stage 2 on, and in float32 of stage 1."""
    found = planned(f"learner.zero_stage={stage}", f"model.dtype={dtype}", ranks=2)
    held = [part(found, "learning", name) for name in ("fp32 masters", "Adam's moments", "gradients")]
    assert held == [6832 * masters, 6832 * moments, 6832 * gradients]


def test_the_peak_is_the_largest_phase() -> None:
    found = planned()
    assert found.bytes == found.total(found.peak) == max(sum(parts.values()) for parts in found.phases.values())
    assert [*found.phases] == ["loading", "sampling", "learning"]


def test_a_reference_model_is_there_only_with_a_kl_term() -> None:
    assert part(planned(), "learning", "reference model") == 0
    assert part(planned("algorithm.kl.coefficient=0.1"), "learning", "reference model") == 4 * 6832


def test_a_sampler_elsewhere_takes_nothing_here_and_is_noted() -> None:
    found = planned("sampler.name=scripted")
    assert part(found, "sampling", "sampler: weights") == 0
    assert any("scripted" in note for note in found.notes)


def test_another_writer_is_a_model_with_keys_and_values_beside_any_sampler() -> None:
    # 2 layers and one while it grows, keys and values of 16 in fp32: 384 bytes a token; 40 tokens of 7 that evaluate
    for name in ("transformers", "scripted"):
        sampler = f"sampler.name={name}"
        alone, found = planned(sampler), planned(sampler, "rollout.condense.writer=initial")
        assert part(found, "sampling", "other writers") == 4 * 6832 + 384 * 7 * 40
        assert found.total("learning") - alone.total("learning") == 4 * 6832


def test_the_sampler_s_own_dtype_counts() -> None:
    assert part(planned("sampler.options.dtype=bfloat16"), "sampling", "sampler: weights") == 2 * 6832


def test_zero_3_gathers_weights_for_reuse() -> None:
    assert part(planned("learner.zero_stage=3", ranks=2), "learning", "gathered weights") == 4 * 6832
    assert part(planned(), "learning", "gathered weights") == 0


def test_attention_along_paths_takes_more_than_flash_attention() -> None:
    """1 piece of 40 queries and keys a row, 5 rows, 2 layers, Q = K = 16: queries by piece, and 40 pairs a query."""
    along, plain = (part(planned(KEPT, *which), "learning", "activations") for which in ((SDPA,), FLASH))
    assert along - plain == 2 * 4 * (16 * 200 + 40 * 200)


# --- against measured peaks (docs/results/memory-prediction.md)

MEASURED = {  # MiB on a CPU, by benchmarks/plan.py
    "ZeRO 0": 1810,
    "ZeRO 1, untied head": 1993,
    "ZeRO 2, vocabulary 152k": 2798,
    "ZeRO 3": 2832,
    "bfloat16, ZeRO 1": 1552,
    "bfloat16, ZeRO 2, few tokens": 2064,
    "LoRA, KL": 647,
    "bfloat16, LoRA, ZeRO 2": 419,
    "whole turns (gspo)": 1121,
}
NEAR = 0.15  # of the measured peak


@pytest.mark.parametrize("name", MEASURED)
def test_a_measured_peak_on_a_cpu_is_predicted(name: str, tmp_path: Path) -> None:
    case = next(case for case in CASES if case.name == name)
    AutoConfig.for_model(case.kind, **case.sizes).save_pretrained(tmp_path)
    config = configured(case, tmp_path)
    found = Plan(config, architecture(config.model), ranks=1, device="cpu")
    assert found.bytes / 2**20 == pytest.approx(MEASURED[name], rel=NEAR)


@pytest.mark.parametrize(
    ("override", "measured"), [("model.attention=sdpa", 12.16), ("learner.compile_layers=on", 6.88)]
)
def test_a_measured_peak_of_the_learner_on_a_gpu_is_predicted(override: str, measured: float) -> None:
    """GiB of an H100 of 80 GB, by ``doctor --gpu``."""
    config = config_on("gpu", "quickstart", [*USUAL, "sampler.name=scripted", override])
    found = Plan(config, architecture(config.model), ranks=1, device="gpu", memory=80 << 30)
    assert found.total("learning") / 2**30 == pytest.approx(measured, rel=NEAR)


# --- adapters


def test_adapters_train_and_everything_else_is_frozen_by_hand() -> None:
    """Rank 3 beside q, k, v, o (16 + 16) and gate, up, down (16 + 32) of 2 layers: 3·2·(4·32 + 3·48)."""
    found = planned("model.lora.rank=3")
    assert (found.trainable, found.weights) == (1632, 6832 + 1632)
    assert part(found, "learning", "weights") == 4 * (6832 + 1632)
    assert part(found, "learning", "Adam's moments") == 8 * 1632
    assert part(found, "learning", "sampler: weights") == 4 * 6832  # adapters are merged into them
    assert found.notes == ()


def test_adapters_are_as_many_as_the_learner_s() -> None:
    policy = add_adapters(
        qwen3(), LoraSettings(rank=3, alpha=1.0, dropout=0.0, targets=("q_proj", "down_proj")), base="", seed=0
    )
    trained = sum(tensor.numel() for tensor in policy.parameters() if tensor.requires_grad)
    layers = adapted_layers(qwen3(), ("q_proj", "down_proj"))
    assert 3 * sum(layer.in_features + layer.out_features for layer in layers) == trained


def test_an_adapter_where_there_is_no_layer_is_a_configuration_error() -> None:
    with pytest.raises(ConfigError, match="no_proj"):
        planned("model.lora.targets=[no_proj]")


def test_the_base_of_adapters_is_their_reference() -> None:
    assert part(planned("model.lora.rank=3", "algorithm.kl.coefficient=0.1"), "learning", "reference model") == 0


# --- what is computed again, shared or elsewhere


def test_as_few_layers_are_computed_again_as_the_memory_allows() -> None:
    """What a run gets is what the plan counts; a number in the configuration stays."""
    wide, alone = ("model.new.layers=9", "learner.tokens_per_micro_batch=400"), "sampler.name=scripted"
    sizes = [planned(*wide, alone, f"learner.checkpoint_activations={count}").total("learning") for count in range(10)]
    assert sizes == sorted(sizes, reverse=True)
    for count in (0, 4, 9):
        memory = ceil(sizes[count] / FILLED)
        assert planned(*wide, alone, memory=memory).checkpointed == count
        config = config_on_devices(vary(CONFIG, (*wide, alone)), ranks=1, memory=memory)
        assert config.learner.checkpoint_activations == count
        assert config_on_devices(config, ranks=1, memory=memory * 2) is config
    assert planned(*wide, alone, memory=sizes[9] // 2).checkpointed == planned(*wide).checkpointed == 9


def test_vllm_prepares_for_the_requests_that_a_run_can_have() -> None:
    """32 problems with 8 samples on 2 ranks, one batch ahead; a number in the configuration stays."""
    run = ("sampler.name=vllm", "train.problems_per_step=32", "train.samples_per_problem=8", "evaluate.problems=8")

    def requests(*overrides: str, memory: int | None = 80 << 30) -> object:
        config = config_on_devices(vary(CONFIG, (*run, *overrides)), ranks=2, memory=memory)
        return config.sampler.options.get("engine", {}).get("max_num_seqs")

    assert requests() == 128
    assert requests("rollout.staleness=1") == 256
    assert requests("evaluate.problems=400", "evaluate.samples=2") == 400
    assert requests("sampler.options.engine.max_num_seqs=7") == 7
    assert requests("sampler.options.engine.max_num_batched_tokens=100") == 100  # vLLM computes a token of each
    assert requests(memory=None) is None


def test_offloads_leave_the_gpu_by_hand() -> None:
    """6832 parameters in float32: masters, moments and sums are elsewhere, always or while the sampler samples."""
    on_gpu, kl = 4 * 6832, "algorithm.kl.coefficient=0.1"
    always = planned("learner.offload.training=optimiser", "learner.zero_stage=2")
    rollouts = planned("learner.offload.rollouts=true", "learner.zero_stage=2")
    for found, where in ((always, "learning"), (always, "sampling"), (rollouts, "sampling")):
        assert part(found, where, "weights") == on_gpu
        assert part(found, where, "fp32 masters") == part(found, where, "Adam's moments") == 0
    assert part(rollouts, "learning", "Adam's moments") == 2 * on_gpu
    weights = planned("learner.offload.training=optimiser_and_weights", "learner.zero_stage=3")
    assert part(weights, "learning", "weights") == 0
    assert part(weights, "learning", "gathered weights") == on_gpu
    assert part(planned(kl, "learner.offload.reference=true"), "sampling", "reference model") == 0
    assert part(planned(kl), "sampling", "reference model") == on_gpu


# --- vLLM beside the learner

VLLM = "sampler.name=vllm"
CARD = 10 << 30
TOGETHER = "sampler.options.engine.tensor_parallel_size"


def test_vllm_takes_its_share_while_it_samples_and_its_graphs_while_the_learner_works() -> None:
    found = planned(VLLM, memory=CARD)
    taken, sleeping = (
        {name: size for name, size in found.phases[phase].items() if name.startswith("sampler:")}
        for phase in ("sampling", "learning")
    )
    assert sum(taken.values()) == pytest.approx(0.4 * CARD, abs=1)
    assert sleeping == {"sampler: CUDA graphs": 1 << 30}
    eager = planned(VLLM, "sampler.options.engine.enforce_eager=true", memory=CARD)
    assert part(eager, "learning", "sampler: CUDA graphs") == 0
    awake = planned(VLLM, "sampler.options.sleep=false", memory=CARD)
    assert part(awake, "learning", "sampler: KV cache") == part(found, "sampling", "sampler: KV cache")


def test_a_sampler_that_works_ahead_does_not_sleep() -> None:
    ahead = planned(VLLM, "rollout.staleness=1", "algorithm.importance.cap=2", memory=CARD)
    assert part(ahead, "learning", "sampler: KV cache") == part(ahead, "sampling", "sampler: KV cache") > 2 << 30


def test_ranks_that_share_a_copy_of_the_model_have_a_part_of_it_and_all_their_requests() -> None:
    """6832 parameters and 2 key heads on 2 ranks; 8 requests of 40 tokens in 2 layers of 2·8 numbers."""
    shared = planned(VLLM, f"{TOGETHER}=2", ranks=2)
    assert part(shared, "sampling", "sampler: weights") == 4 * 6832 / 2
    assert part(shared, "sampling", "sampler: KV cache") == 8 * 40 * 2 * 2 * 8 * 4
    assert shared.requests == 2 * planned(VLLM, ranks=2).requests == 8
    for ranks, sharing in ((1, 2), (4, 4)):
        with pytest.raises(ConfigError, match=f"is {sharing}, and {ranks} ranks and 2 heads are to be divided"):
            planned(VLLM, f"{TOGETHER}={sharing}", "train.problems_per_step=4", ranks=ranks)


def test_keys_and_values_of_vllm_are_those_that_are_set_or_that_all_requests_use() -> None:
    """7 requests of 40 tokens: 2 layers of 2·16 numbers."""
    assert part(planned(VLLM), "sampling", "sampler: KV cache") == 7 * 40 * 2 * 2 * 16 * 4
    assert any("--device-memory" in note for note in planned(VLLM).notes)
    set_to = planned(VLLM, "sampler.options.engine.kv_cache_gib=2", memory=CARD)
    assert part(set_to, "sampling", "sampler: KV cache") == 2 << 30


def test_a_share_that_holds_no_request_is_refused_and_raised() -> None:
    small = ("sampler.options.engine.gpu_memory_utilization=0.01", "sampler.options.engine.max_num_batched_tokens=256")
    small = (*small, "sampler.options.engine.enforce_eager=true", "sampler.options.engine.max_num_seqs=256")
    config = vary(CONFIG, [VLLM, *small])
    memory = 32 << 20
    found = Plan(config, architecture(config.model), ranks=1, device="gpu", memory=memory)
    assert found.refusal is not None
    assert "vLLM would not start" in found.refusal
    assert not found.fits(1 << 40)
    change = remedy(found, memory)
    assert change is not None
    assert [*change[0]] == [small[0].partition("=")[0]]


# --- the head


def test_eager_attention_takes_more() -> None:
    plain = part(planned(KEPT, *FLASH), "learning", "activations")
    assert part(planned(KEPT, "model.attention=eager"), "learning", "activations") > plain


@settings(max_examples=15)
@given(
    stage=st.integers(0, 3),
    tokens=st.integers(40, 3000),
    context=st.integers(30, 500),
    dtype=st.sampled_from(("float32", "bfloat16")),
)
def test_larger_budgets_never_take_less(stage: int, tokens: int, context: int, dtype: str) -> None:
    size = architecture(CONFIG.model)

    def planned_with(*overrides: str) -> Plan:
        fixed = (f"learner.zero_stage={stage}", f"model.dtype={dtype}", f"rollout.limits.max_context_tokens={context}")
        return Plan(vary(CONFIG, [*fixed, *overrides]), size, ranks=1, device="gpu")

    smaller = planned_with(f"learner.tokens_per_micro_batch={tokens}")
    larger = planned_with(f"learner.tokens_per_micro_batch={2 * tokens}")
    assert smaller.bytes <= larger.bytes
    referring = planned_with(f"learner.tokens_per_micro_batch={tokens}", "algorithm.kl.coefficient=1")
    assert smaller.bytes <= referring.bytes


# --- what to change


def fitting(room: int, *overrides: str) -> tuple[Overrides, Plan] | None:
    return remedy(planned(*overrides), room)


def test_the_mildest_change_that_fits_is_named() -> None:
    found = fitting(planned().bytes - 1)
    assert found is not None
    change, after = found
    assert change == {"learner.tokens_per_micro_batch": "100"}
    assert after.bytes < planned().bytes


def test_a_sampler_that_takes_most_is_made_smaller() -> None:
    overrides = ("evaluate.problems=256", "rollout.limits.max_context_tokens=500", "learner.tokens_per_micro_batch=600")
    before = planned(*overrides)
    assert before.peak == "sampling"
    found = fitting(before.bytes - 1, *overrides)
    assert found is not None
    assert found[0] == {"sampler.options.max_batch": "128"}


def test_a_change_that_is_named_fits() -> None:
    peak = planned("train.problems_per_step=64").bytes
    for share in (0.9, 0.7, 0.5, 0.3):
        found = fitting(int(share * peak), "train.problems_per_step=64")
        assert found is not None
        assert found[1].bytes <= share * peak


def test_advice_names_what_lowers_memory_and_what_the_run_accepts() -> None:
    """Batches are as small as a row: what is left is recomputation, bfloat16, main memory, and other ranks."""
    narrow = ("learner.tokens_per_micro_batch=40", "sampler.name=scripted", KEPT, SDPA)
    found = fitting(int(0.9 * planned(*narrow).bytes), *narrow)
    assert found is not None
    assert found[0] in ({"learner.checkpoint_activations": "on"}, {"model.attention": "auto"})
    wide = ("learner.tokens_per_micro_batch=40", "sampler.name=scripted", "model.dtype=bfloat16", *WIDE)
    found = fitting(int(0.5 * planned(*wide).bytes), *wide)
    assert found is not None
    assert found[0]["learner.offload.training"].startswith("optimiser")
    assert "learner.zero_stage" in found[0]  # which it needs


def test_what_is_not_needed_is_taken_back() -> None:
    before = planned("train.problems_per_step=64")
    found = fitting(int(0.6 * before.bytes), "train.problems_per_step=64")
    assert found is not None
    for left_out in found[0]:
        rest = [f"{key}={value}" for key, value in found[0].items() if key != left_out]
        assert planned("train.problems_per_step=64", *rest).bytes > 0.6 * before.bytes


def test_no_change_makes_a_model_fit_into_nothing() -> None:
    assert fitting(1000) is None
    assert "model.lora" in advice(planned(), None)
    assert "model.lora" not in advice(planned("model.lora={}"), None)  # which has it already


# --- the command


@pytest.mark.parametrize(
    ("text", "size"), [("24GiB", 24 << 30), ("80 GB", 80 * 10**9), ("512MiB", 512 << 20), ("1.5g", 3 << 29)]
)
def test_sizes_are_read(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "GiB", "24", "-1GiB", "0GiB", "24 elephants", "1e3", "nan"])
def test_what_is_no_size_is_a_configuration_error(text: str) -> None:
    with pytest.raises(ConfigError, match="wanted a positive size"):
        parse_size(text)


# two heads of 32, or four of 16: the norms of queries and keys of two layers are 2 · 2 · 16 numbers shorter
TINY = {
    "quickstart": "262,592",
    "quickstart_full": "262,592",
    "quickstart_outcome": "262,592",
}


def test_shipped_configurations_with_a_new_model_are_planned() -> None:
    for name in shipped():
        if load_config(find_config(name)).model.path is None:
            out = succeed("plan", f"configs/{name}.yaml")
            if name in TINY and not torch.cuda.is_available():
                assert f"{TINY[name]} parameters, float32, ZeRO 0 on 1 × cpu" in out, name
            assert "activations" in out, name
            assert "at most" in out, name


def test_what_does_not_fit_exits_with_1_and_says_what_would() -> None:
    done = run("plan", "gsm8k", "model.dtype=float32", "--device-memory", "192MiB")
    assert done.returncode == 1
    assert "does not fit: needs 221.0 MiB, available 172.8 MiB (192.0 MiB less 10% for CUDA, NCCL and" in done.stdout
    assert "it would fit, with" in done.stdout
    assert "\n  sampler.options.max_batch=64 learner.tokens_per_micro_batch=8192\n" in done.stdout


def test_json_holds_what_the_table_shows() -> None:
    done = run("plan", "quickstart", "--device-memory", "24GiB", "--json", "--ranks", "2", "learner.zero_stage=2")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert (found["version"], found["device"], found["ranks"], found["fits"]) == (1, "gpu", 2, True)
    assert found["peak"]["bytes"] == max(one["bytes"] for one in found["phases"])
    assert all(one["bytes"] == sum(one["parts"].values()) for one in found["phases"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("quickstart", "--device-memory", "lots"), "reading --device-memory 'lots'"),
        (("quickstart", "no.such=1"), "unknown key"),
        (("nowhere.yaml",), "there is no such file"),
        (("quickstart", "--ranks", "7"), "does not divide over 7 ranks"),
    ],
)
def test_what_is_wrong_exits_with_2(arguments: tuple[str, ...], message: str) -> None:
    done = run("plan", *arguments)
    assert done.returncode == 2
    assert message in done.stderr


def test_what_a_run_would_refuse_on_a_gpu_is_refused_by_its_plan() -> None:
    """In bfloat16, a GPU's default, DeepSpeed's optimiser of ZeRO 0 cannot move its state."""
    arguments = ("quickstart", "learner.offload.rollouts=true")
    assert run("plan", *arguments, "--device", "cpu").returncode == 0
    done = run("plan", *arguments, "--device", "gpu")
    assert done.returncode == 2
    assert "learner.zero_stage=2" in done.stderr
