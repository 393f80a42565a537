"""Adapters: what they compute, what trains, what the sampler gets, and that the base is never touched."""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
import two_ranks
from adapters import EVERYWHERE, LORA, adapted_qwen3, moved_qwen3, trained_weights
from command import succeed_on_two_ranks
from packed import collate, computed
from peft import LoraConfig, PeftModel, get_peft_model, set_peft_model_state_dict
from tiny import llama, plain_logprobs, qwen3, rows, surrogate_step, tokenizer
from torch import Tensor
from torch.optim import AdamW
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedModel
from two_ranks import OPTIMISER, STEPS, loss, micro_batches

from condensegrpo.config.load import find_config, load_config
from condensegrpo.core.errors import CheckpointError, ConfigError
from condensegrpo.core.trajectory import Segment
from condensegrpo.learner import checkpoint
from condensegrpo.learner.engine import (
    STAGES,
    DeepSpeedEngine,
    close_deepspeed,
    measure_logprobs,
    open_deepspeed,
    optimizer_step,
)
from condensegrpo.learner.lora import adapted, adapter_dropout, adapters_disabled, add_adapters
from condensegrpo.learner.lora_targets import check_targets, check_targets_of
from condensegrpo.learner.model_folder import in_main_memory, load_policy, write_policy
from condensegrpo.learner.settings import ALL_LINEAR, LoraSettings
from condensegrpo.learner.weights import adapters, gathered_weights, write_adapter

HERE = Path(__file__).parent
TEMPERATURE = 0.9


pytestmark = pytest.mark.usefixtures("one_thread")


def engine(policy: PreTrainedModel, stage: int = 0) -> DeepSpeedEngine:
    return open_deepspeed(policy, zero_stage=stage, optimizer=OPTIMISER, total_steps=10, dtype="float32")


def weights(learner: DeepSpeedEngine) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in gathered_weights(learner)}


def logits(model: torch.nn.Module) -> Tensor:
    with torch.no_grad():
        found: Tensor = model(input_ids=torch.arange(12)[None], use_cache=False).logits
    return found


def loaded(tensors: dict[str, Tensor]) -> PreTrainedModel:
    """The plain model of some weights."""
    model = qwen3(seed=9)
    model.load_state_dict(tensors, strict=False)
    return model


def peft_qwen3(moved: PreTrainedModel) -> PeftModel:
    """PEFT's own model of the same base and adapters."""
    config = LoraConfig(r=LORA.rank, lora_alpha=8, lora_dropout=0.0, target_modules=list(LORA.targets))
    model = get_peft_model(qwen3(), config).eval()
    adapters = {f"base_model.model.{name}": tensor for name, tensor in trained_weights(moved).items()}
    assert model.load_state_dict(adapters, strict=False).unexpected_keys == []
    return model


def plain(steps: Sequence[Sequence[Segment]]) -> dict[str, Tensor]:
    """Plain torch and PEFT: rows one by one with all logits, AdamW on the adapters, clipping and schedule by hand."""
    model = peft_qwen3(moved_qwen3())
    trained = [tensor for tensor in model.parameters() if tensor.requires_grad]
    adamw = AdamW(trained, lr=0.01, betas=(0.9, 0.95), eps=1e-3, weight_decay=0.1)
    for step, some in enumerate(steps):
        adamw.param_groups[0]["lr"] = (0.005, 0.01)[step]  # warm-up of two steps to 0.01
        for row in some:
            batch = collate([row])
            logp_T = plain_logprobs(model, row, temperature=TEMPERATURE)
            surrogate_step(logp_T, batch).backward()
        torch.nn.utils.clip_grad_norm_(trained, 0.05)
        adamw.step()
        adamw.zero_grad()
    return dict(model.merge_and_unload().state_dict())


def assert_same(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert found.keys() == wanted.keys() - {"lm_head.weight"}  # tied to the embeddings
    for name, tensor in found.items():
        torch.testing.assert_close(tensor, wanted[name], rtol=1e-5, atol=1e-6)


def test_adapters_change_nothing_before_the_first_step() -> None:
    assert torch.equal(logits(adapted_qwen3()), logits(qwen3()))


def test_only_adapters_take_a_gradient_and_the_base_keeps_its_names_and_bytes() -> None:
    policy = adapted_qwen3()
    assert {name.split(".lora_")[1] for name in trained_weights(policy)} == {"A.default.weight", "B.default.weight"}
    assert len(trained_weights(policy)) == 2 * 3 * 2  # layers, targets, A and B
    base = {name.replace(".base_layer", ""): tensor for name, tensor in policy.named_parameters() if "lora" not in name}
    wanted = dict(qwen3().named_parameters())
    assert base.keys() == wanted.keys()
    assert all(torch.equal(base[name], tensor) for name, tensor in wanted.items())


def test_the_seed_makes_the_adapters_and_leaves_torchs_generator_alone() -> None:
    first, again, other = adapted_qwen3(seed=1), adapted_qwen3(seed=1), adapted_qwen3(seed=2)
    name = "model.layers.0.self_attn.q_proj.lora_A.default.weight"
    assert torch.equal(first.get_parameter(name), again.get_parameter(name))
    assert not torch.equal(first.get_parameter(name), other.get_parameter(name))
    qwen3()  # seeds torch's generator
    wanted = torch.rand(3)
    adapted_qwen3()
    assert torch.equal(torch.rand(3), wanted)


def test_all_linear_means_every_linear_layer_but_the_head() -> None:
    policy = adapted_qwen3(EVERYWHERE)
    places = {name for name, part in policy.named_modules() if adapted(part) is not None}
    ends = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
    assert {name.rpartition(".")[2] for name in places} == ends
    assert len(places) == 14


@pytest.mark.parametrize("target", ["qproj", "lm_head", "embed_tokens", "layers", "proj"])
def test_a_target_that_is_no_layer_is_refused_with_those_that_are(target: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_targets(llama(), ("q_proj", target))
    message = str(caught.value)
    assert f"names '{target}', which is no linear layer of LlamaForCausalLM" in message
    assert "left out: q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj." in message


def test_targets_are_checked_from_the_configuration_alone(tmp_path: Path) -> None:
    qwen3().config.save_pretrained(tmp_path)  # a folder without weights
    check_targets_of(str(tmp_path), ("q_proj", "layers.1.mlp.up_proj"))
    check_targets_of(str(tmp_path), "all-linear")
    with pytest.raises(ConfigError, match="names 'c_attn'"):
        check_targets_of(str(tmp_path), ("c_attn",))


@pytest.mark.parametrize("stage", [0, 2])  # two ranks below: every stage
def test_lora_under_a_zero_stage_equals_plain_torch_and_peft(stage: int) -> None:
    steps = [rows(6, seed=step) for step in range(STEPS)]
    learner = engine(moved_qwen3(), stage)
    for some in steps:
        optimizer_step(learner, micro_batches(some, 2), loss, temperature=TEMPERATURE)
    found = weights(learner)
    close_deepspeed(learner)
    assert_same(found, plain(steps))


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What two real processes found."""
    folder = tmp_path_factory.mktemp("ranks")
    succeed_on_two_ranks("with_adapters", str(folder), program=two_ranks.main)
    return folder


@pytest.mark.parametrize("stage", STAGES)
def test_lora_on_two_ranks_with_uneven_rows_equals_plain_torch_and_peft(ranks: Path, stage: int) -> None:
    wanted = plain([rows(7, seed=step) for step in range(STEPS)])
    for rank in range(2):
        found, alone, _ = torch.load(ranks / f"adapters_stage{stage}_rank{rank}.pt")
        assert_same(found, wanted)
        sampler = peft_qwen3(moved_qwen3())  # gets the adapters alone
        assert not set_peft_model_state_dict(sampler, alone).unexpected_keys
        torch.testing.assert_close(dict(sampler.merge_and_unload().state_dict()), wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("stage", STAGES)
def test_the_reference_of_two_ranks_is_the_base_however_few_rows_a_rank_has(ranks: Path, stage: int) -> None:
    base = qwen3()
    for rank, mine in ((0, slice(0, 5)), (1, slice(5, 7))):
        *_, references = torch.load(ranks / f"adapters_stage{stage}_rank{rank}.pt")
        some = [row for step in range(STEPS) for row in rows(7, seed=step)[mine]]
        assert len(references) == len(some)
        for row, found_T in zip(some, references, strict=True):
            torch.testing.assert_close(found_T, plain_logprobs(base, row, temperature=TEMPERATURE).detach())


@pytest.mark.parametrize("stage", [0, 3])
def test_merge_drift_the_base_is_bit_identical_after_any_number_of_syncs(stage: int) -> None:
    """trl#3466: merging in place and taking it back moves the base a little with every sync."""
    learner = engine(moved_qwen3(EVERYWHERE), stage)
    for step in range(2):
        optimizer_step(learner, micro_batches(rows(4, seed=step), 2), loss)
        first = weights(learner)
        for _ in range(2):
            again = weights(learner)
            assert all(torch.equal(tensor, again[name]) for name, tensor in first.items())
    with adapters_disabled(learner.module):
        base = weights(learner)
    close_deepspeed(learner)
    wanted = qwen3().state_dict()
    assert [name for name, tensor in base.items() if not torch.equal(tensor, wanted[name])] == []


def test_merged_weights_are_those_of_peft() -> None:
    policy = moved_qwen3()
    wanted = logits(peft_qwen3(policy).merge_and_unload())
    of_the_adapters = logits(policy)
    learner = engine(policy)
    found = logits(loaded(weights(learner)))
    close_deepspeed(learner)
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-5)
    torch.testing.assert_close(found, of_the_adapters, rtol=0, atol=1e-4)
    assert not torch.allclose(found, logits(qwen3()), atol=0.1)


def test_merged_bfloat16_weights_are_rounded_once() -> None:
    policy = moved_qwen3().to(torch.bfloat16)
    layer = adapted(policy.get_submodule("model.layers.1.mlp.down_proj"))
    assert layer is not None
    exact = layer.weight.double() + layer.b.double() @ layer.a.double() * 2.0
    learner = open_deepspeed(policy, zero_stage=1, optimizer=OPTIMISER, total_steps=10, dtype="bfloat16")
    found = weights(learner)["model.layers.1.mlp.down_proj.weight"]
    close_deepspeed(learner)
    assert found.dtype == torch.bfloat16
    assert torch.equal(found, exact.to(torch.bfloat16))


@pytest.mark.parametrize("stage", [0, 3])
def test_lora_in_bfloat16_stays_near_fp32(stage: int) -> None:
    found = {}
    for dtype in ("float32", "bfloat16"):
        policy = moved_qwen3().to(torch.float32 if dtype == "float32" else torch.bfloat16)
        learner = open_deepspeed(policy, zero_stage=stage, optimizer=OPTIMISER, total_steps=10, dtype=dtype)
        found[dtype] = [
            optimizer_step(learner, micro_batches(rows(6, seed=step), 2), loss)["grad_norm"] for step in range(2)
        ]
        close_deepspeed(learner)
    assert found["bfloat16"] == pytest.approx(found["float32"], rel=0.1)


def test_the_optimiser_holds_states_of_adapters_only() -> None:
    learner = engine(moved_qwen3())
    optimizer_step(learner, micro_batches(rows(4), 2), loss)
    states = learner.optimizer.state
    assert sum(state["exp_avg"].numel() for state in states.values()) == sum(
        tensor.numel() for tensor in trained_weights(learner.module.policy).values()
    )
    assert all(tensor.grad is None for tensor in learner.module.parameters() if not tensor.requires_grad)
    close_deepspeed(learner)


def test_dropout_is_active_in_the_optimisers_passes_and_nowhere_else() -> None:
    policy, some = moved_qwen3(EVERYWHERE), micro_batches(rows(4), 4)
    learner = engine(policy)
    still = measure_logprobs(learner, some)[0]
    assert torch.equal(measure_logprobs(learner, some)[0], still)
    batch = some[0]
    seen = []
    for _ in range(2):
        with adapter_dropout(learner.module):
            seen.append(computed(learner.module, batch, 1.0).detach())
    assert not torch.equal(seen[0], still)
    assert not torch.equal(seen[0], seen[1])
    assert [part.training for part in policy.modules() if part.training] == []
    assert torch.equal(measure_logprobs(learner, some)[0], still)
    close_deepspeed(learner)


def test_dropout_leaves_an_adapters_input_out_or_scales_it_and_never_the_bases() -> None:
    """An adapter that reads input 0 and adds it to every output, times s = 2, with dropout 0.5: 0 or 2·2 is added."""
    layer = moved_qwen3(EVERYWHERE).get_submodule("model.layers.0.mlp.up_proj")
    own = adapted(layer)
    assert own is not None
    x = torch.ones(50, 16)
    with torch.no_grad():
        own.a.copy_(torch.eye(2, 16))
        own.b.copy_(torch.tensor([1.0, 0.0]).expand(32, 2))
        with adapter_dropout(layer):
            added = layer(x) - x @ own.weight.T
        torch.testing.assert_close(added, added[:, :1].expand(50, 32))
        assert {round(value, 3) for value in added[:, 0].tolist()} == {0.0, 4.0}
        with adapters_disabled(layer), adapter_dropout(layer):
            assert torch.equal(layer(x), x @ own.weight.T)


@pytest.mark.parametrize("stage", [1])  # two ranks of test_checkpoint.py: 3
def test_resume_with_adapters_and_dropout_continues_bit_equal(tmp_path: Path, stage: int) -> None:
    torch.manual_seed(5)
    batches = [micro_batches(rows(5, seed=step), 2) for step in range(4)]
    first = engine(adapted_qwen3(EVERYWHERE), stage)
    for some in batches[:2]:
        optimizer_step(first, some, loss)
    checkpoint.save(first, tmp_path, step=2, state={"cursor": 2})
    wanted = [optimizer_step(first, some, loss) for some in batches[2:]]
    wanted_weights = weights(first)
    close_deepspeed(first)

    torch.manual_seed(99)
    second = engine(adapted_qwen3(EVERYWHERE, seed=7), stage)
    assert checkpoint.load_checkpoint(second, tmp_path / "step_000002") == {"cursor": 2}
    assert [optimizer_step(second, some, loss) for some in batches[2:]] == wanted
    found = weights(second)
    close_deepspeed(second)
    assert [name for name, tensor in found.items() if not torch.equal(tensor, wanted_weights[name])] == []


@pytest.mark.parametrize("stage", [0, 3])
def test_a_checkpoint_holds_the_adapters_and_not_the_base_again(tmp_path: Path, stage: int) -> None:
    learner = engine(moved_qwen3(), stage)
    path = checkpoint.save(learner, tmp_path, step=1, state={})
    close_deepspeed(learner)
    saved = torch.load(path / "train_rank_0.pt", weights_only=True)
    assert len(saved["pieces"]) == 12
    assert all(".lora_" in name for name in saved["pieces"])


@pytest.mark.parametrize(
    ("other", "stage"),
    [
        (lambda: adapted_base(seed=1), 0),
        (lambda: adapted_base(seed=1), 3),
        (qwen3, 0),
        (lambda: adapted_qwen3(EVERYWHERE), 3),
    ],
    ids=["other base, 0", "other base, 3", "no adapters", "other adapters"],
)
def test_a_checkpoint_of_another_model_is_refused(tmp_path: Path, other: object, stage: int) -> None:
    assert callable(other)
    learner = engine(moved_qwen3(), stage)
    path = checkpoint.save(learner, tmp_path, step=1, state={})
    close_deepspeed(learner)
    stranger = engine(other(), stage)
    before = weights(stranger)
    with pytest.raises(CheckpointError, match="it belongs to another model"):
        checkpoint.load_checkpoint(stranger, path)
    assert all(torch.equal(tensor, before[name]) for name, tensor in weights(stranger).items())
    close_deepspeed(stranger)


def adapted_base(*, seed: int) -> PreTrainedModel:
    """Another base of the same shapes, one number of which differs in its last bit."""
    policy = adapted_qwen3(seed=seed)
    weight = policy.get_parameter("model.norm.weight")
    weight.data[0] = torch.nextafter(weight.data[0], torch.tensor(9.0))
    return policy


@pytest.mark.parametrize("stage", [3])
def test_the_adapter_folder_on_its_base_is_the_merged_model(tmp_path: Path, stage: int) -> None:
    base = tmp_path / "base"
    write_policy(base, qwen3().config, in_main_memory(qwen3().named_parameters()), tokenizer=tokenizer())
    learner = engine(moved_qwen3(), stage)
    optimizer_step(learner, micro_batches(rows(4), 2), loss)
    write_adapter(tmp_path / "adapter", learner.module.policy, dict(adapters(learner)))
    merged = loaded(weights(learner))
    close_deepspeed(learner)
    found = PeftModel.from_pretrained(load_policy(str(base), dtype="float32"), str(tmp_path / "adapter"))
    torch.testing.assert_close(logits(found), logits(merged), rtol=0, atol=1e-4)
    assert not found.peft_config["default"].use_dora
    assert found.peft_config["default"].base_model_name_or_path == "base"
    assert (found.peft_config["default"].r, found.peft_config["default"].lora_alpha) == (4, 8.0)


@pytest.mark.parametrize("stage", [3])
def test_a_model_with_a_head_of_its_own_is_synced_under_its_own_names(stage: int) -> None:
    learner = engine(add_adapters(llama(), EVERYWHERE, base="base", seed=0), stage)
    found = weights(learner)
    close_deepspeed(learner)
    wanted = llama().state_dict()  # B is 0: merged is what it was
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in wanted.items())


def test_a_model_without_linear_layers_is_told_so() -> None:
    config = GPT2Config(vocab_size=32, n_embd=16, n_layer=1, n_head=2, n_positions=32)
    with pytest.raises(ConfigError, match=r"GPT2LMHeadModel has 0 linear layers \(none\)"):
        check_targets(GPT2LMHeadModel(config), ALL_LINEAR)
    with pytest.raises(ConfigError, match=r"model\.lora\.targets names 0\. Name some"):
        check_targets(llama(), ())


def test_the_defaults_are_those_of_the_section_and_bad_values_are_refused() -> None:
    lora = load_config(find_config("quickstart"), ["model.lora={}"]).model.lora
    assert lora is not None
    assert (lora.rank, lora.alpha, lora.dropout) == (16, 32.0, 0.0)
    assert lora.targets == tuple(f"{name}_proj" for name in ("q", "k", "v", "o", "gate", "up", "down"))
    assert load_config(find_config("quickstart")).model.lora is None
    for fault in ("dropout=1.0", "dropout=-0.1", "rank=0", "alpha=0", "targets=all"):
        with pytest.raises(ConfigError, match=r"model\.lora\."):
            load_config(find_config("quickstart"), [f"model.lora.{fault}"])


def test_the_words_all_linear_are_not_taken_for_letters() -> None:
    targets = {
        text: load_config(find_config("quickstart"), [f"model.lora.targets={text}"]).model.lora
        for text in ("all-linear", "[q_proj]")
    }
    assert targets == {
        "all-linear": LoraSettings(targets=ALL_LINEAR),
        "[q_proj]": LoraSettings(targets=("q_proj",)),
    }
