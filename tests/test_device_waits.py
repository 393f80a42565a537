"""No wait for the device between micro-batches, emulated by a device without data and by counting operations."""

from types import SimpleNamespace

import pytest
import torch
from device_waits import DeviceWaits
from estimating import LOSSES
from test_attention_kernels import flex, varlen
from tiny import forking_rows, llama, qwen3, rows
from two_ranks import micro_batches

from condensegrpo.algorithms.objective import Objective, ObjectiveFunction, PerToken
from condensegrpo.algorithms.packing import lay_out
from condensegrpo.learner import devices
from condensegrpo.learner.attention_kernels import Kernels
from condensegrpo.learner.engine import close_deepspeed, figures_of, open_deepspeed, optimizer_step
from condensegrpo.learner.logprobs import TrainedLogprobs
from condensegrpo.learner.settings import OptimizerSettings

pytestmark = pytest.mark.usefixtures("one_thread")

META = torch.device("meta")
OBJECTIVES = {
    "tokens": PerToken(Objective(loss=LOSSES["clipped"], first_update=True, kl_coefficient=0.1)),
    "turns": Objective(loss=LOSSES["gspo"], importance_cap=2.0, importance_level="turn"),
}


class OnMeta(TrainedLogprobs):
    """Computes trees on the meta device with a given kernel."""

    kernels_there = Kernels("")

    def kernels(self, device: torch.device) -> Kernels:
        return self.kernels_there


@pytest.mark.parametrize("objective", OBJECTIVES.values(), ids=OBJECTIVES)
def test_a_micro_batch_is_one_upload_and_nothing_of_it_is_read_back(objective: ObjectiveFunction) -> None:
    """Reading from the meta device fails: forward, backward and statistics do without."""
    module, batch = OnMeta(qwen3().to(META)), lay_out([tuple(forking_rows(9))])
    with DeviceWaits() as counted:
        placed = module.place(batch, META)
        summed = module(placed, 0.9, objective=objective)
        summed.loss.backward()
        statistics = figures_of(summed, placed.predicted_here)
    assert (counted.uploads, counted.waits.total()) == (1, 0)
    assert statistics.sums.device == META
    assert module.policy.get_input_embeddings().weight.grad is not None


@pytest.mark.parametrize("kernels", [Kernels("", flex=flex), Kernels("", varlen=varlen, max_keys=9.0), None])
def test_the_patterns_of_gpu_kernels_and_rows_side_by_side_are_one_upload(kernels: Kernels | None) -> None:
    module = OnMeta(llama().to(META))
    module.kernels_there, module.why_plain_rows = kernels, None if kernels else "plain rows are requested"
    batch = lay_out([(row,) for row in forking_rows(9)])
    with DeviceWaits() as counted:
        placed = module.place(batch, META)
    assert (counted.uploads, counted.waits["download"]) == (1, 0)
    assert (placed.pattern is None) == (kernels is None)
    assert {tensor.device for tensor in (placed.source, *placed.columns.columns.values())} == {META}


def test_an_upload_is_asynchronous_from_pinned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    module = OnMeta(llama().to(META))
    with DeviceWaits() as counted:
        module.place(lay_out([tuple(forking_rows(9))]), META)
    assert (counted.uploads, counted.pinned) == (1, 1)


@pytest.mark.parametrize(("stage", "dtype"), [(0, "float32"), (1, "bfloat16"), (2, "bfloat16"), (3, "float32")])
def test_more_micro_batches_are_no_more_waits(stage: int, dtype: str) -> None:
    """DeepSpeed's part of a micro-batch included; what is read at the end of a step is read once."""
    policy, waits = qwen3().to(getattr(torch, dtype)), []
    engine = open_deepspeed(policy, zero_stage=stage, optimizer=OptimizerSettings(lr=1e-3), total_steps=9, dtype=dtype)
    for count in (2, 2, 5):
        batches = micro_batches(rows(2 * count), 2)
        with DeviceWaits() as counted:
            optimizer_step(engine, batches, OBJECTIVES["tokens"])
        waits.append(+counted.waits)
    close_deepspeed(engine)
    assert waits[1] == waits[2]  # in its first step ZeRO 3 records the order of the layers


@pytest.mark.parametrize(
    ("available", "environment", "expected"),
    [(True, {}, ["expandable_segments:True"]), (False, {}, []), (True, {"PYTORCH_ALLOC_CONF": "backend:native"}, [])],
)
def test_segments_expand_on_a_gpu_unless_the_environment_sets_the_allocator(
    available: bool, environment: dict[str, str], expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    settings: list[str] = []
    monkeypatch.setattr(devices, "gpu", SimpleNamespace(is_available=lambda: available))
    monkeypatch.setattr(devices, "set_allocator", settings.append)
    devices.expand_segments(environment)
    assert settings == expected
