from collections.abc import Callable

import pytest
import torch
from tiny import llama, qwen3, rows
from transformers import PreTrainedModel
from two_ranks import OPTIMISER, loss, micro_batches

from condensegrpo.learner.engine import close_deepspeed, open_deepspeed, optimizer_step
from condensegrpo.learner.weights import gathered_weights


@pytest.mark.parametrize(("make", "stage"), [(qwen3, 0), (llama, 1), (qwen3, 2), (llama, 3), (qwen3, 3)])
def test_gathered_weights_are_the_state_dict_under_its_names(make: Callable[[], PreTrainedModel], stage: int) -> None:
    wanted = {name: tensor.clone() for name, tensor in make().state_dict().items()}
    engine = open_deepspeed(make(), zero_stage=stage, optimizer=OPTIMISER, total_steps=10, dtype="float32")
    found = {name: tensor.clone() for name, tensor in gathered_weights(engine)}
    close_deepspeed(engine)
    assert found.keys() == wanted.keys() - ({"lm_head.weight"} if make is qwen3 else set())  # tied: once
    for name, tensor in found.items():
        assert torch.equal(tensor, wanted[name])


@pytest.mark.parametrize("stage", [0, 3])
def test_gathering_between_steps_disturbs_nothing(stage: int) -> None:
    found = []
    for looks in (False, True):
        engine = open_deepspeed(qwen3(), zero_stage=stage, optimizer=OPTIMISER, total_steps=10, dtype="float32")
        for step in range(3):
            optimizer_step(engine, micro_batches(rows(4, seed=step), 2), loss)
            if looks:
                assert len(list(gathered_weights(engine))) == 24
        found.append({name: tensor.clone() for name, tensor in gathered_weights(engine)})
        close_deepspeed(engine)
    assert all(torch.equal(tensor, found[1][name]) for name, tensor in found[0].items())


def test_zero_3_gathers_one_module_at_a_time() -> None:
    """Of a new engine: small weights stay gathered after a step."""
    engine = open_deepspeed(qwen3(), zero_stage=3, optimizer=OPTIMISER, total_steps=10, dtype="float32")
    weights = [*engine.module.parameters()]
    gathered = [sum(each.ds_status.name == "AVAILABLE" for each in weights) for _ in gathered_weights(engine)]
    close_deepspeed(engine)
    assert len(gathered) > 10
    assert max(gathered) <= 2
