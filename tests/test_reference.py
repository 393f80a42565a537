"""What a KL term is measured to: a frozen copy, or the learner's own base under its adapters."""

from dataclasses import replace
from pathlib import Path
from typing import Any, Self

import pytest
import torch
from adapters import EVERYWHERE, adapted_qwen3, moved_qwen3
from tiny import plain_logprobs, qwen3, rows, tokenizer
from two_ranks import OPTIMISER, loss, micro_batches

from condensegrpo.algorithms.losses import k3
from condensegrpo.learner.engine import (
    against_base,
    against_copy,
    close_deepspeed,
    measure_logprobs,
    open_deepspeed,
    open_reference,
    optimizer_step,
)
from condensegrpo.learner.logprobs import TrainedLogprobs
from condensegrpo.learner.model_folder import in_main_memory, write_policy
from condensegrpo.learner.weights import gathered_weights

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def copy(tmp_path: Path) -> TrainedLogprobs:
    """A frozen copy of the base that the adapters of these tests stand on."""
    base = qwen3()
    write_policy(tmp_path, base.config, in_main_memory(base.named_parameters()), tokenizer=tokenizer())
    return open_reference(str(tmp_path), dtype="float32", attention="sdpa", device="cpu")


@pytest.mark.parametrize("stage", [0, 3])
def test_with_adapters_the_divergence_is_0_before_the_first_step(stage: int) -> None:
    learner = open_deepspeed(
        adapted_qwen3(EVERYWHERE), zero_stage=stage, optimizer=OPTIMISER, total_steps=10, dtype="float32"
    )
    batches = micro_batches(rows(5), 2)
    policy = measure_logprobs(learner, batches)
    reference = [batch.reference for batch in against_base(learner, batches, 1.0)]
    close_deepspeed(learner)
    assert all(torch.equal(one_T, other_T) for one_T, other_T in zip(policy, reference, strict=True))
    assert sum(float(k3(one_T, other_T).sum()) for one_T, other_T in zip(policy, reference, strict=True)) == 0.0


@pytest.mark.parametrize("stage", [0, 3])
def test_after_some_steps_the_base_says_what_a_frozen_copy_says(copy: TrainedLogprobs, stage: int) -> None:
    learner = open_deepspeed(
        adapted_qwen3(EVERYWHERE), zero_stage=stage, optimizer=OPTIMISER, total_steps=10, dtype="float32"
    )
    for step in range(2):
        optimizer_step(learner, micro_batches(rows(5, seed=step), 2), loss)
    batches = micro_batches(rows(6, seed=9), 4)
    policy = measure_logprobs(learner, batches, temperature=0.9)
    base = against_base(learner, batches, 0.9)
    close_deepspeed(learner)
    frozen = against_copy(copy, "cpu", batches, 0.9)
    for logp_T, one, other in zip(policy, base, frozen, strict=True):
        torch.testing.assert_close(one.reference, other.reference)
        assert float(k3(logp_T, one.reference).sum()) > 1e-4  # it has moved


@pytest.mark.parametrize("stage", [1, 3])
def test_measuring_the_reference_between_steps_disturbs_nothing(stage: int) -> None:
    """Neither the weights nor the masks of dropout, nor what ZeRO 3 knows of the order of the layers."""
    found = []
    for looks in (False, True):
        torch.manual_seed(0)
        learner = open_deepspeed(
            moved_qwen3(EVERYWHERE), zero_stage=stage, optimizer=OPTIMISER, total_steps=10, dtype="float32"
        )
        for step in range(2):
            batches = micro_batches(rows(4, seed=step), 2)
            if looks:
                against_base(learner, batches, 1.0)
            optimizer_step(learner, batches, loss)
        found.append({name: tensor.clone() for name, tensor in gathered_weights(learner)})
        close_deepspeed(learner)
    assert all(torch.equal(tensor, found[1][name]) for name, tensor in found[0].items())


def test_a_frozen_copy_is_exact_takes_no_gradient_and_goes_back_to_where_it_was(copy: TrainedLogprobs) -> None:
    some = rows(4)
    (batch,) = against_copy(copy, torch.device("cpu"), micro_batches(some, 4), 0.7)
    wanted = torch.cat([plain_logprobs(qwen3(), row, temperature=0.7) for row in some]).detach()
    torch.testing.assert_close(batch.reference, wanted)
    assert not batch.reference.requires_grad
    assert [tensor for tensor in copy.parameters() if tensor.requires_grad] == []
    assert {tensor.device.type for tensor in copy.parameters()} == {"cpu"}


def test_a_frozen_copy_goes_back_to_where_it_was_after_a_failure() -> None:
    class Moved(TrainedLogprobs):
        def to(self, device: Any) -> Self:
            moves.append(torch.device(device))
            return self

    moves: list[torch.device] = []
    (batch,) = micro_batches(rows(4), 4)
    beyond_vocabulary = replace(batch, token_ids=batch.token_ids + 10**6)
    with pytest.raises(IndexError):
        against_copy(Moved(qwen3()), "cpu:0", [beyond_vocabulary], 1.0)
    assert moves == [torch.device("cpu:0"), torch.device("cpu")]


def test_a_frozen_copy_without_micro_batches_says_nothing(copy: TrainedLogprobs) -> None:
    assert against_copy(copy, "cpu", [], 1.0) == []


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_an_offloaded_copy_is_on_the_gpu_only_while_it_is_used(copy: TrainedLogprobs) -> None:
    batches = micro_batches(rows(4), 4)
    (on_cpu,) = against_copy(copy, "cpu", batches, 1.0)
    before = torch.cuda.memory_allocated()
    (on_gpu,) = against_copy(copy, "cuda", batches, 1.0)
    assert {tensor.device.type for tensor in copy.parameters()} == {"cpu"}
    assert torch.cuda.memory_allocated() <= before
    torch.testing.assert_close(on_gpu.reference, on_cpu.reference, rtol=1e-4, atol=1e-4)
