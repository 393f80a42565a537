"""The learner of models that see: equal to transformers' own forward pass of a padded batch, whatever is shared."""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from command import succeed_on_two_ranks
from packed import computed
from seeing import World, opened_world, plain_logprobs, world
from seeing_ranks import SCENARIOS, Found, main, train
from torch import Tensor
from torch.nn.utils import clip_grad_norm_
from torch.optim import AdamW
from transformers import PreTrainedModel
from vision_models import FAMILIES

from condensegrpo.algorithms.packing import PackedBatch, blocks, lay_out, micro_batches
from condensegrpo.core.trajectory import Segment
from condensegrpo.learner.layers import checkpoint_layers, try_compiling
from condensegrpo.learner.logprobs import TrainedLogprobs
from condensegrpo.learner.lora import add_adapters
from condensegrpo.learner.lora_targets import adapted_layers
from condensegrpo.learner.settings import LoraSettings, Vision
from condensegrpo.learner.vision_tower import tower

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor"),  # of a trial of compiled layers
]


@pytest.fixture(scope="module")
def homes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of each family, with pictures."""
    folder = tmp_path_factory.mktemp("families")
    for family in FAMILIES:
        world(family, folder / family)
    return folder


@pytest.fixture(params=FAMILIES)
def seen(request: pytest.FixtureRequest, homes: Path) -> World:
    return opened_world(homes / request.param)


@pytest.fixture(params=["qwen3_vl", "llava_onevision"])
def some(request: pytest.FixtureRequest, homes: Path) -> World:
    """What does not depend on the family is tried with two: deepstack features, and a weight beside the modules."""
    return opened_world(homes / request.param)


def gradients(model: PreTrainedModel) -> dict[str, Tensor]:
    found = {name: tensor.grad.clone() for name, tensor in model.named_parameters() if tensor.grad is not None}
    model.zero_grad()
    return found


def expected(seen: World, model: PreTrainedModel, rows: Sequence[Segment]) -> tuple[list[Tensor], dict[str, Tensor]]:
    logps = plain_logprobs(model, rows, seen.processor)
    sum(row.turns[0].weight * logp.sum() for row, logp in zip(rows, logps, strict=True)).backward()
    return [logp.detach() for logp in logps], gradients(model)


def assert_same(
    module: TrainedLogprobs, batches: Sequence[PackedBatch], wanted: tuple[list[Tensor], dict[str, Tensor]]
) -> None:
    logps = []
    for batch in batches:
        logp_T = computed(module, batch, 1.0)
        (batch.weights * logp_T).sum().backward()
        logps.append(logp_T.detach())
    torch.testing.assert_close(torch.cat(logps).sort().values, torch.cat(wanted[0]).sort().values, rtol=0, atol=1e-5)
    found = gradients(module.policy)
    assert found.keys() == wanted[1].keys()
    scale = max(float(each.abs().max()) for each in wanted[1].values())
    for name, each in wanted[1].items():
        torch.testing.assert_close(found[name], each, rtol=1e-5, atol=1e-5 * scale)


def test_rows_in_every_layout_equal_a_padded_batch(seen: World) -> None:
    """A tree, micro-batches, and rows apart: models whose attention cannot be replaced are given those."""
    policy, rows = seen.policy(), seen.rows()
    wanted = expected(seen, policy, rows)
    module = seen.learner(policy)
    assert module.computes_trees
    tree = lay_out([tuple(module.pictures.named(rows))])
    assert tree.token_ids.numel() < sum(len(row.token_ids) for row in rows)
    assert_same(module, [tree], wanted)
    batches = micro_batches(
        blocks(module.pictures.named(rows), max_tokens=seen.longest, share=True), max_tokens=seen.longest
    )
    assert len(batches) > 1
    assert_same(module, batches, wanted)
    module.why_plain_rows = "as such a model"
    assert_same(module, [lay_out([(row,) for row in module.pictures.named(rows)])], wanted)


def test_a_frozen_tower_and_layers_that_are_computed_again_give_the_same_gradients(some: World) -> None:
    policy, rows = some.policy(frozen=True), some.rows()
    wanted = expected(some, policy, rows)
    module = some.learner(policy)
    batches = micro_batches(
        blocks(module.pictures.named(rows), max_tokens=some.longest, share=False), max_tokens=some.longest
    )
    assert_same(module, batches, wanted)
    for _, tensor in tower(policy):
        tensor.requires_grad_(True)
    wanted = expected(some, policy, rows)
    checkpoint_layers(policy)
    assert_same(some.learner(policy), [lay_out([tuple(module.pictures.named(rows))])], wanted)


def stepped(seen: World, *, frozen: bool = False) -> Found:
    """The reference: torch's own AdamW, two steps on all rows."""
    policy = seen.policy(frozen=frozen)
    trained = [tensor for tensor in policy.parameters() if tensor.requires_grad]
    adamw, norms, logps = AdamW(trained, lr=0.01, betas=(0.9, 0.95), eps=1e-3, weight_decay=0.0), [], []
    for _ in range(2):
        of_rows = plain_logprobs(policy, seen.rows(), seen.processor)
        logps += [logp.detach() for logp in of_rows]
        sum(-row.turns[0].weight * logp.sum() for row, logp in zip(seen.rows(), of_rows, strict=True)).backward()
        norms.append(float(clip_grad_norm_(trained, 10.0)))
        adamw.step()
        adamw.zero_grad()
    return {name: tensor.detach() for name, tensor in policy.named_parameters()}, norms, torch.cat(logps).sort().values


def assert_same_steps(found: Found, wanted: Found) -> None:
    assert found[1] == pytest.approx(wanted[1], rel=1e-5)
    assert found[0].keys() == wanted[0].keys()
    for name, tensor in wanted[0].items():
        torch.testing.assert_close(found[0][name], tensor, rtol=1e-5, atol=1e-5)


@pytest.fixture(scope="module")
def ranks(homes: Path) -> Path:
    """What two real processes found."""
    succeed_on_two_ranks(str(homes), program=main)
    return homes


@pytest.mark.parametrize(("family", "name"), [(family, name) for family, names in SCENARIOS.items() for name in names])
def test_two_ranks_equal_plain_torch_on_all_rows(ranks: Path, family: str, name: str) -> None:
    """One of them has no picture, or half of the tokens of every row."""
    wanted = stepped(opened_world(ranks / family))
    results: list[Found] = [torch.load(ranks / f"{family}_{name}_rank{rank}.pt") for rank in range(2)]
    for found in results:
        assert_same_steps(found, wanted)
    logps = results[0][2] if name == "together" else torch.cat([found[2] for found in results])
    torch.testing.assert_close(logps.sort().values, wanted[2], rtol=0, atol=1e-5)


def test_a_frozen_tower_has_neither_gradients_nor_optimiser_state(homes: Path) -> None:
    seen = opened_world(homes / "qwen3_vl")
    found = train(seen, [seen.rows()] * 2, stage=1, frozen=True)
    assert_same_steps(found, stepped(seen, frozen=True))
    before = seen.policy()
    of_tower = {name for name, _ in tower(before)}
    changed = {name for name, tensor in before.named_parameters() if not torch.equal(found[0][name], tensor)}
    assert of_tower
    assert changed
    assert not changed & of_tower


@pytest.mark.parametrize(("family", "vision"), [("qwen3_vl", "frozen"), ("llava_onevision", "train")])
def test_adapters_stand_in_the_tower_only_if_it_trains(homes: Path, family: str, vision: Vision) -> None:
    some = opened_world(homes / family)
    policy = add_adapters(some.policy(), LoraSettings(rank=2, targets="all-linear"), base="base", seed=0, vision=vision)
    adapted = [name for name, tensor in policy.named_parameters() if tensor.requires_grad]
    of_tower = [name for name, tensor in tower(policy) if tensor.requires_grad]
    assert len(adapted) > len(of_tower)
    assert bool(of_tower) == (vision == "train")
    expected = 2 * len(adapted_layers(some.policy(), "all-linear", vision))
    assert len(adapted) == expected
    module = some.learner(policy)
    batch = lay_out([tuple(module.pictures.named(some.rows()))])
    computed(module, batch, 1.0).sum().backward()
    assert {name for name, tensor in policy.named_parameters() if tensor.grad is not None} <= {*adapted}
    torch.testing.assert_close(  # B is 0 at first
        computed(module, batch, 1.0).sort().values,
        torch.cat(plain_logprobs(some.policy(), some.rows(), some.processor)).sort().values,
        rtol=0,
        atol=1e-5,
    )


def test_a_trial_of_compiled_layers_makes_a_model_of_few_layers(homes: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("condensegrpo.learner.layers.ROW", 16)
    config = opened_world(homes / "qwen3_vl").policy().config
    trial = try_compiling(config, torch.float32, torch.device("cpu"), kernel="sdpa", backend="eager")
    assert trial.difference is not None, trial.fault
    assert trial.difference < 1e-4
