"""``condensegrpo plan``: parameters, phases, tokens, advice; and the command as a person calls it."""

import json
import subprocess
import sys
from math import ceil
from pathlib import Path

import pytest
import torch
from command import ENVIRONMENT, ROOT, run, succeed
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tiny import llama, qwen3
from transformers import AutoConfig, GPT2Config, GPT2LMHeadModel

from condensegrpo.cli.plan import _bytes
from condensegrpo.config.load import find_config, load_config, shipped, validate, vary
from condensegrpo.config.schema import ModelSettings, RunConfig
from condensegrpo.core.errors import ConfigError
from condensegrpo.learner.lora import add_adapters
from condensegrpo.learner.new_model import new_model, new_tokenizer
from condensegrpo.learner.settings import LoraSettings, NewModel
from condensegrpo.learner.targets import adapted_layers
from condensegrpo.planning.architecture import architecture
from condensegrpo.planning.formulas import Decoder, MicroBatch, branches_bytes, intervals_bytes
from condensegrpo.planning.learning import PlannedRun, head
from condensegrpo.planning.plan import FILLED, Phase, Plan, config_on_devices, plan
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
    return plan(varied, architecture(varied.model), ranks=ranks, device="gpu", memory=memory)


def phase(found: Plan, name: str) -> Phase:
    return next(one for one in found.phases if one.name == name)


def part(found: Plan, name: str, what: str) -> int:
    return sum(one.bytes for one in phase(found, name).parts if one.name == what)


# --- the model


@pytest.mark.parametrize("make", [qwen3, llama])
def test_parameters_are_those_of_the_real_model(make: object, tmp_path: Path) -> None:
    model = make()  # type: ignore[operator]  # one of two factories
    model.config.save_pretrained(tmp_path)  # config.json alone, no weights
    found = architecture(ModelSettings(path=str(tmp_path)))
    assert found.parameters == sum(tensor.numel() for tensor in model.parameters())
    assert found.decoder.tied == model.config.tie_word_embeddings
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
    assert (found.decoder.hidden, found.decoder.layers, found.decoder.ffn) == (16, 2, 64)
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
    assert found.tokens.optimiser_steps == 5
    assert planned("algorithm.updates_per_batch=2").tokens.optimiser_steps == 10
    assert planned(ranks=2).tokens.micro_batches == 3


def test_the_largest_micro_batch_by_hand() -> None:
    """200 tokens in rows of 40, of which at most 39 can be trained: four turns of 10 that continue each other."""
    assert planned().run.batch == MicroBatch(tokens=200, length=40, trained=195)
    assert planned("rollout.limits.max_turns=1").run.batch == MicroBatch(tokens=200, length=40, trained=50)
    assert planned("learner.tokens_per_micro_batch=5000").run.batch.tokens == 24 * 40  # there are no more


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


def test_a_row_that_no_micro_batch_holds_is_a_note() -> None:
    found = planned("learner.tokens_per_micro_batch=32")
    assert "a row may have 40 tokens" in found.notes[0]
    assert found.run.batch.tokens == 32


# --- memory


def test_what_is_there_while_learning_by_hand() -> None:
    """6832 parameters of 4 bytes: the sampler's, the learner's, two moments, gradients of earlier micro-batches."""
    found = planned()
    weights = 4 * 6832
    assert part(found, "learning", "sampler: weights") == weights
    assert part(found, "learning", "weights") == weights
    assert part(found, "learning", "Adam's moments") == 2 * weights
    assert part(found, "learning", "gradients") == weights


def test_the_peak_is_the_largest_phase_and_a_phase_the_sum_of_its_parts() -> None:
    found = planned()
    assert found.peak.bytes == max(one.bytes for one in found.phases)
    assert [one.name for one in found.phases] == ["loading", "rolling out", "learning", "publishing"]
    assert all(one.bytes == sum(size for _, size in one.parts) for one in found.phases)


def test_a_reference_model_is_there_only_with_a_kl_term() -> None:
    assert part(planned(), "learning", "reference model") == 0
    assert part(planned("algorithm.kl.coefficient=0.1"), "learning", "reference model") == 4 * 6832


def test_a_sampler_elsewhere_takes_nothing_here_and_is_noted() -> None:
    found = planned("sampler.name=scripted")
    assert part(found, "rolling out", "sampler: weights") == 0
    assert any("scripted" in note for note in found.notes)
    written = [
        len(planned("sampler.name=vllm_server", *more).notes)
        for more in ((), ("sampler.options={server: {weights: nccl}}",))
    ]
    assert written == [2, 1]  # over NCCL updates need no folder


def test_the_initial_policy_that_writes_is_a_copy_with_keys_and_values_beside_any_sampler() -> None:
    # 2 layers and one while it grows, keys and values of 16 in fp32: 384 bytes a token; 40 tokens of 7 that evaluate
    for name in ("transformers", "scripted"):
        sampler = f"sampler.name={name}"
        alone, found = planned(sampler), planned(sampler, "rollout.condense.writer=initial")
        assert part(found, "rolling out", "initial policy: KV cache") == 384 * 7 * 40
        assert part(found, "learning", "initial policy: weights") == 4 * 6832
        assert phase(found, "learning").bytes - phase(alone, "learning").bytes == 4 * 6832


def test_the_sampler_s_own_dtype_counts() -> None:
    assert part(planned("sampler.options.dtype=bfloat16"), "rolling out", "sampler: weights") == 2 * 6832


def test_zero_3_gathers_what_it_publishes() -> None:
    assert part(planned("learner.zero_stage=3", ranks=2), "publishing", "gathered weights") == 4 * 1600
    assert part(planned(), "publishing", "gathered weights") == 0


def test_short_branches_of_a_long_context_are_noted_for_what_they_gather() -> None:
    long = (
        "rollout.limits.max_context_tokens=4000",
        "rollout.limits.max_output_tokens=8",
        "learner.tokens_per_micro_batch=16384",
    )
    wide = (KEPT, "model.new.hidden_size=4096", "train.samples_per_problem=64")

    def noted(*overrides: str) -> bool:
        return any("gathers" in note for note in planned(*long, *overrides).notes)

    assert noted(*wide, SDPA)
    assert noted(*wide, "model.attention=flash")
    assert not noted(*wide)  # flex
    assert not noted(*wide, *FLASH)
    assert not noted(SDPA)


def test_kernels_of_a_gpu_keep_blocks_or_gathered_keys() -> None:
    """8192 tokens are 64 × 64 blocks, in four lists of int32; 100 keys more are 100 · 2 · 16 numbers in each layer."""
    batch = MicroBatch(tokens=8192, length=4096, trained=1)
    decoder = Decoder(
        hidden=48,
        layers=3,
        heads=6,
        kv_heads=2,
        head_size=8,
        ffn=112,
        vocabulary=99,
        normed_heads=False,
        tied=True,
    )
    assert intervals_bytes(batch) == 4 * 4 * 64**2 + 4 * 8192
    assert branches_bytes(decoder, batch, 8292, 2) == 8 * 8292 + 3 * 100 * 2 * 16 * 2


def test_attention_along_paths_takes_more_than_flash_attention() -> None:
    """1 piece of 40 queries and keys a row, 5 rows; 2 layers, 2 key heads, Q = K = 16.

    A layer: 4·(16·600 + 2·16·200 + 5·1600) + 4·2·200, less 4·(64·200) + 4·2·200. Once: 8000 and 8·800, of which 400 for
    depth and index of each query.
    """
    along, plain = (part(planned(KEPT, *which), "learning", "activations") for which in ((SDPA,), FLASH))
    assert along - plain == 14_400 + 2 * (4 * (9600 + 6400 + 8000) - 4 * 12_800)


# --- adapters


def test_adapters_train_and_everything_else_is_frozen_by_hand() -> None:
    """Rank 3 beside q, k, v, o (16 + 16) and gate, up, down (16 + 32) of 2 layers: 3·2·(4·32 + 3·48)."""
    found = planned("model.lora.rank=3")
    assert (found.run.weights.trainable, found.run.weights.frozen) == (1632, 6832)
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


def test_adapters_on_some_layers_only_are_noted() -> None:
    assert "every linear layer" in planned("model.lora.targets=[q_proj]").notes[0]


def test_an_adapter_where_there_is_no_layer_is_a_configuration_error() -> None:
    with pytest.raises(ConfigError, match="no_proj"):
        planned("model.lora.targets=[no_proj]")


def test_the_base_of_adapters_is_their_reference() -> None:
    assert part(planned("model.lora.rank=3", "algorithm.kl.coefficient=0.1"), "learning", "reference model") == 0


def test_what_is_not_counted_is_noted() -> None:
    assert any("warm start" in note for note in planned("model.lora.rank=3", "warm_start.steps=5").notes)


# --- what is computed again, shared or elsewhere


def test_checkpointed_layers_keep_their_inputs_by_hand() -> None:
    """200 tokens, 2 layers of 16 numbers; outside: id 8, cos and sin 2·8, x and x̂ of 16, 1/rms; one layer anew."""
    found = planned(FLASH[0])  # a GPU: checkpointing is on
    assert part(found, "learning", "activations") == 200 * (2 * 4 * 16 + 8 + 4 * 2 * 8 + 2 * 4 * 16 + 4)
    layer = 2 * (3 * 4 * 16 + 4) + 4 * (2 * 16 + 2 * 16) + 4 * 2 + 4 * 4 * 32 + 8 * (16 + 16) + 4 * (2 + 2)
    assert part(found, "learning", "a layer, computed again") == 200 * layer
    assert part(planned(KEPT, *FLASH), "learning", "a layer, computed again") == 0


def test_as_few_layers_are_computed_again_as_the_memory_allows() -> None:
    """What a run gets is what the plan counts; a number in the configuration stays."""
    wide, alone = ("model.new.layers=9", "learner.tokens_per_micro_batch=400"), "sampler.name=scripted"
    sizes = [
        phase(planned(*wide, alone, f"learner.checkpoint_activations={count}"), "learning").bytes for count in range(10)
    ]
    assert sizes == sorted(sizes, reverse=True)
    for count in (0, 4, 9):
        memory = ceil(sizes[count] / FILLED)
        assert planned(*wide, alone, memory=memory).run.checkpointed == count
        config = config_on_devices(vary(CONFIG, (*wide, alone)), ranks=1, memory=memory)
        assert config.learner.checkpoint_activations == count
        assert config_on_devices(config, ranks=1, memory=memory * 2) is config
    assert planned(*wide, alone, memory=sizes[9] // 2).run.checkpointed == planned(*wide).run.checkpointed == 9


def test_what_is_sent_in_every_micro_batch_is_noted_by_hand() -> None:
    """On two ranks stage 2 sends half the gradients twice; stage 3 once, and half the weights three times.

    Stages 0 and 1 send once a step, and so does a step of one micro-batch.
    """
    wide = ("model.new.hidden_size=2048", "model.new.ffn_size=8192", "model.new.heads=8", "sampler.name=scripted")

    def sent(stage: int, *overrides: str) -> list[str]:
        found = planned(*wide, f"learner.zero_stage={stage}", *overrides, ranks=2)
        return [note for note in found.notes if "in every micro-batch" in note]

    parameters = planned(*wide).run.weights.trainable
    for stage, copies in ((2, 2), (3, 4)):
        (note,) = sent(stage)
        a_micro_batch, once = (4 * parameters * count / 2 / 2**30 for count in (copies, 2))
        assert note.startswith(f"ZeRO {stage} sends {a_micro_batch:.1f} GiB from each device in every micro-batch")
        assert f"learner.zero_stage=1 sends {once:.1f} GiB once a step" in note
        assert sent(stage, "learner.tokens_per_micro_batch=20000") == []
    assert sent(1) == sent(0) == []


def test_ranks_that_share_a_row_have_a_part_of_its_tokens() -> None:
    """100 of 200 tokens each, with the output of attention by heads and by tokens."""
    whole, shared = planned(*FLASH, ranks=2), planned(*FLASH, "learner.sequence_parallel=2", ranks=2)
    assert (whole.tokens.micro_batches, shared.tokens.micro_batches) == (3, 5)
    assert part(shared, "learning", "activations") == part(whole, "learning", "activations") / 2
    own = part(whole, "learning", "a layer, computed again") // 2
    assert part(shared, "learning", "a layer, computed again") == own + 100 * 4 * 16
    with pytest.raises(ConfigError, match="sequence_parallel: found 2, which does not divide the number of ranks, 1"):
        planned("learner.sequence_parallel=2")


def test_flex_gathers_nothing() -> None:
    along, flex = (part(planned(KEPT, kernel), "learning", "activations") for kernel in (SDPA, "model.attention=flex"))
    plain = part(planned(KEPT, *FLASH), "learning", "activations")
    assert flex - plain == 4 * 4 * 2 * 2 + 4 * 256  # 200 tokens: 2 × 2 blocks, and an integer a token of 256
    assert along > flex
    assert part(planned(KEPT), "learning", "activations") == flex  # auto, on a GPU


def test_offloads_leave_the_gpu_by_hand() -> None:
    """6832 parameters in float32: masters, moments and sums are elsewhere, always or while the sampler samples."""
    on_gpu, kl = 4 * 6832, "algorithm.kl.coefficient=0.1"
    always = planned("learner.offload.training=optimiser", "learner.zero_stage=2")
    rollouts = planned("learner.offload.rollouts=true", "learner.zero_stage=2")
    for found, where in ((always, "learning"), (always, "rolling out"), (rollouts, "rolling out")):
        assert part(found, where, "weights") == on_gpu
        assert part(found, where, "fp32 masters") == part(found, where, "Adam's moments") == 0
    assert part(rollouts, "learning", "Adam's moments") == 2 * on_gpu
    weights = planned("learner.offload.training=optimiser_and_weights", "learner.zero_stage=3")
    assert part(weights, "learning", "weights") == 0
    assert part(weights, "learning", "gathered weights") == on_gpu
    assert part(planned(kl, "learner.offload.reference=true"), "rolling out", "reference model") == 0
    assert part(planned(kl), "rolling out", "reference model") == on_gpu


# --- vLLM beside the learner

VLLM = "sampler.name=vllm"
CARD = 10 << 30
TOGETHER = "sampler.options.engine.tensor_parallel_size"


def test_vllm_takes_its_share_while_it_samples_and_its_graphs_while_the_learner_works() -> None:
    found = planned(VLLM, memory=CARD)
    beside = sum(one.bytes for one in phase(found, "rolling out").parts if not one.name.startswith("sampler:"))
    assert phase(found, "rolling out").bytes - beside == pytest.approx(0.4 * CARD, abs=1)
    sleeping = {one.name: one.bytes for one in phase(found, "learning").parts if one.name.startswith("sampler:")}
    assert sleeping == {"sampler: weights": 0, "sampler: CUDA graphs": 1 << 30}
    eager = planned(VLLM, "sampler.options.engine.enforce_eager=true", memory=CARD)
    assert part(eager, "learning", "sampler: CUDA graphs") == 0
    assert part(found, "publishing", "sampler: weights") == 4 * 6832
    awake = planned(VLLM, "sampler.options.sleep=false", memory=CARD)
    assert part(awake, "learning", "sampler: KV cache") == part(found, "rolling out", "sampler: KV cache")


def test_a_sampler_that_works_ahead_does_not_sleep() -> None:
    ahead = planned(VLLM, "rollout.staleness=1", "algorithm.importance.cap=2", memory=CARD)
    assert part(ahead, "learning", "sampler: KV cache") == part(ahead, "rolling out", "sampler: KV cache") > 2 << 30


def test_ranks_that_share_a_copy_of_the_model_have_a_part_of_it_and_all_their_requests() -> None:
    """6832 parameters and 2 key heads on 2 ranks; 8 requests of 40 tokens in 2 layers of 2·8 numbers."""
    shared = planned(VLLM, f"{TOGETHER}=2", ranks=2)
    assert part(shared, "rolling out", "sampler: weights") == 4 * 6832 / 2
    assert part(shared, "rolling out", "sampler: KV cache") == 8 * 40 * 2 * 2 * 8 * 4
    assert shared.requests == 2 * planned(VLLM, ranks=2).requests == 8
    for ranks, sharing in ((1, 2), (4, 4)):
        with pytest.raises(ConfigError, match=f"is {sharing}, and {ranks} ranks and 2 heads are to be divided"):
            planned(VLLM, f"{TOGETHER}={sharing}", "train.problems_per_step=4", ranks=ranks)


def test_a_base_that_sleeps_in_main_memory_is_noted() -> None:
    """Adapters that vLLM computes itself: 2 bytes of 6832 parameters of each of 2 ranks are pinned."""
    lora = (VLLM, "model.lora.rank=3", "model.dtype=bfloat16")
    assert any("pinned main memory" in note for note in planned(*lora, ranks=2, memory=CARD).notes)
    assert planned(*lora, "model.lora.sampler=merged", memory=CARD).notes == ()


def test_keys_and_values_of_vllm_are_those_that_are_set_or_that_all_requests_use() -> None:
    """7 requests of 40 tokens: 2 layers of 2·16 numbers."""
    assert part(planned(VLLM), "rolling out", "sampler: KV cache") == 7 * 40 * 2 * 2 * 16 * 4
    assert any("--device-memory" in note for note in planned(VLLM).notes)
    set_to = planned(VLLM, "sampler.options.engine.kv_cache_gib=2", memory=CARD)
    assert part(set_to, "rolling out", "sampler: KV cache") == 2 << 30


def test_a_share_that_holds_no_request_is_refused_and_raised() -> None:
    small = ("sampler.options.engine.gpu_memory_utilization=0.01", "sampler.options.engine.max_num_batched_tokens=100")
    small = (*small, "sampler.options.engine.enforce_eager=true")
    config = vary(CONFIG, [VLLM, *small])
    memory = 32 << 20
    found = plan(config, architecture(config.model), ranks=1, device="gpu", memory=memory)
    assert found.refusal is not None
    assert "vLLM would not start" in found.refusal
    assert not found.fits(1 << 40)
    change = remedy(found, memory)
    assert change is not None
    assert [override.partition("=")[0] for override in change[0]] == [small[0].partition("=")[0]]


def test_adapters_that_vllm_computes_need_no_merged_weight() -> None:
    """Rank 3 has the room of 8: 1632·8/3 numbers of 2 bytes. In float32 they are merged."""
    native, merged = (
        planned(VLLM, "model.lora.rank=3", f"model.dtype={dtype}", memory=CARD) for dtype in ("bfloat16", "float32")
    )
    assert part(native, "rolling out", "sampler: adapters") == 2 * 1632 * 8 // 3
    assert part(merged, "rolling out", "sampler: adapters") == 0

    def updating(found: Plan) -> int:
        return part(found, "publishing", "a weight on its way")

    assert updating(native) == 0
    assert (updating(merged), phase(merged, "publishing").moment) == (0, "a checkpoint")  # which takes more


# --- the head


@pytest.mark.parametrize("whole", ["algorithm.loss.name=gspo", "algorithm.importance={cap: 2, level: turn}"])
def test_objectives_of_whole_turns_take_chunks(whole: str) -> None:
    """195 trained tokens: chunks hold them all, three times 195·100; tiles of a GPU too, once, beside the gradient."""

    def of(*overrides: str) -> int:
        varied = vary(CONFIG, overrides)
        model = architecture(varied.model)
        return head(
            PlannedRun(config=varied, model=model, ranks=1, device="gpu", memory=None, checkpointed=0),
            planned().run.batch,
        )

    both = 2 * 4 * 195 * 16
    assert of() == 4 * 195 * 100 + 4 * 100 * 16 + both
    assert of(whole) == 3 * 4 * 195 * 100 + both


def test_eager_attention_takes_more() -> None:
    plain = part(planned(*FLASH), "learning", "activations")
    assert part(planned("model.attention=eager"), "learning", "activations") > plain


@settings(max_examples=40)
@given(
    stage=st.integers(0, 3),
    tokens=st.integers(40, 3000),
    context=st.integers(30, 500),
    dtype=st.sampled_from(("float32", "bfloat16")),
)
@example(stage=0, tokens=1266, context=43, dtype="float32")  # two micro-batches become one
def test_larger_budgets_never_take_less(stage: int, tokens: int, context: int, dtype: str) -> None:
    """Except that a single micro-batch does without the gradients of the embedding that earlier ones left."""
    size = architecture(CONFIG.model)

    def planned_with(*overrides: str) -> Plan:
        fixed = (f"learner.zero_stage={stage}", f"model.dtype={dtype}", f"rollout.limits.max_context_tokens={context}")
        return plan(vary(CONFIG, [*fixed, *overrides]), size, ranks=1, device="gpu")

    smaller = planned_with(f"learner.tokens_per_micro_batch={tokens}")
    larger = planned_with(f"learner.tokens_per_micro_batch={2 * tokens}")
    if larger.tokens.micro_batches > 1 or smaller.tokens.micro_batches == 1:
        assert smaller.peak.bytes <= larger.peak.bytes
    referring = planned_with(f"learner.tokens_per_micro_batch={tokens}", "algorithm.kl.coefficient=1")
    assert smaller.peak.bytes <= referring.peak.bytes


# --- what to change


def fitting(room: int, *overrides: str) -> tuple[Overrides, Plan] | None:
    return remedy(planned(*overrides), room)


def test_the_mildest_change_that_fits_is_named() -> None:
    found = fitting(planned().peak.bytes - 1)
    assert found is not None
    change, after = found
    assert change == ("learner.tokens_per_micro_batch=100",)
    assert after.peak.bytes < planned().peak.bytes


def test_a_sampler_that_takes_most_is_made_smaller() -> None:
    overrides = ("evaluate.problems=256", "rollout.limits.max_context_tokens=500", "learner.tokens_per_micro_batch=600")
    before = planned(*overrides)
    assert before.peak.name == "rolling out"
    found = fitting(before.peak.bytes - 1, *overrides)
    assert found is not None
    assert found[0] == ("sampler.options.max_batch=128",)


def test_a_change_that_is_named_fits() -> None:
    peak = planned("train.problems_per_step=64").peak.bytes
    for share in (0.9, 0.7, 0.5, 0.3):
        found = fitting(int(share * peak), "train.problems_per_step=64")
        assert found is not None
        assert found[1].peak.bytes <= share * peak


def test_advice_names_what_lowers_memory_and_what_the_run_accepts() -> None:
    """Batches are as small as a row: what is left is recomputation, bfloat16, main memory, and other ranks."""
    narrow = ("learner.tokens_per_micro_batch=40", "sampler.name=scripted", KEPT, SDPA)
    found = fitting(int(0.9 * planned(*narrow).peak.bytes), *narrow)
    assert found is not None
    assert found[0] in {("learner.checkpoint_activations=on",), ("model.attention=auto",)}
    wide = ("learner.tokens_per_micro_batch=40", "sampler.name=scripted", "model.dtype=bfloat16", *WIDE)
    found = fitting(int(0.5 * planned(*wide).peak.bytes), *wide)
    assert found is not None
    assert any("learner.offload.training=optimiser" in override for override in found[0])
    assert any("learner.zero_stage=" in override for override in found[0])  # which it needs


def test_what_is_not_needed_is_taken_back() -> None:
    before = planned("train.problems_per_step=64")
    found = fitting(int(0.6 * before.peak.bytes), "train.problems_per_step=64")
    assert found is not None
    for left_out in found[0]:
        rest = [override for override in found[0] if override != left_out]
        assert planned("train.problems_per_step=64", *rest).peak.bytes > 0.6 * before.peak.bytes


def test_no_change_makes_a_model_fit_into_nothing() -> None:
    assert fitting(1000) is None
    assert "model.lora" in advice(planned(), None)
    assert "model.lora" not in advice(planned("model.lora={}"), None)  # which has it already


# --- the command


@pytest.mark.parametrize(
    ("text", "size"), [("24GiB", 24 << 30), ("80 GB", 80 * 10**9), ("512MiB", 512 << 20), ("1.5g", 3 << 29)]
)
def test_sizes_are_read(text: str, size: int) -> None:
    assert _bytes(text) == size


@pytest.mark.parametrize("text", ["", "GiB", "24", "-1GiB", "0GiB", "24 elephants", "1e3", "nan"])
def test_what_is_no_size_is_a_configuration_error(text: str) -> None:
    with pytest.raises(ConfigError, match="wanted a positive size"):
        _bytes(text)


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
    done = run("plan", "gsm8k", "model.dtype=float32", "--device-memory", "1GiB")
    assert done.returncode == 1
    assert "does not fit: needs 1.25 GiB, available 921.6 MiB (1.00 GiB less 10% for CUDA, NCCL and" in done.stdout
    assert "it would fit, with" in done.stdout
    assert "\n  sampler.options.max_batch=64\n" in done.stdout


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


def test_planning_imports_no_deepspeed() -> None:
    program = (
        "import sys; from condensegrpo.planning import plan, architecture, remedies;"
        "sys.exit('deepspeed' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], check=False, timeout=120, cwd=ROOT, env=dict(ENVIRONMENT))
    assert done.returncode == 0


def test_what_a_run_would_refuse_on_a_gpu_is_refused_by_its_plan() -> None:
    """In bfloat16, a GPU's default, DeepSpeed's optimiser of ZeRO 0 cannot move its state."""
    arguments = ("quickstart", "learner.offload.rollouts=true")
    assert run("plan", *arguments, "--device", "cpu").returncode == 0
    done = run("plan", *arguments, "--device", "gpu")
    assert done.returncode == 2
    assert "learner.zero_stage=2" in done.stderr
