"""The trial of a sampler against the learner: what agrees passes, what does not is found out.

vLLM is tried in test_vllm_sampler.py, whose process has imported it.
"""

import textwrap
from collections.abc import Sequence
from pathlib import Path

import pytest

from condensegrpo.cli.doctor import Level, tried_here
from condensegrpo.config.load import vary
from condensegrpo.storage.run_folder import RunFolder
from condensegrpo.training.parity import BOUNDS, MOVED, Parity, ParityTrial, parity_config, parity_trial

FAULTS = """
from condensegrpo.samplers.transformers import TransformersSampler
from condensegrpo.core.trajectory import Generation


class Stale(TransformersSampler):
    '''Takes the first weights and no others: rollouts of the base model for ever.'''

    def update(self, named_tensors, version):
        if version == 0:
            super().update(named_tensors, version)


class Forgetful(TransformersSampler):
    '''What it held when it slept is what it samples with.'''

    asleep = False

    def sleep(self, *, keep_weights):
        self.asleep = True

    def update(self, named_tensors, version):
        if not self.asleep:
            super().update(named_tensors, version)


class Raw(TransformersSampler):
    '''Tells log-probabilities of another temperature than it samples at.'''

    async def sample(self, prompt_ids, params):
        found = await super().sample(prompt_ids, params)
        told = tuple(logprob * params.temperature for logprob in found.logprobs)
        return Generation(token_ids=found.token_ids, logprobs=told, finish=found.finish)
"""


def held(some: Sequence[Parity]) -> list[bool]:
    return [one.holds(BOUNDS["float32", "cpu"]) for one in some]


def try_out(name: str, tmp_path: Path) -> ParityTrial:
    return parity_trial(parity_config(name, {}), RunFolder.create(tmp_path / "run"))


@pytest.fixture
def faults(tmp_path: Path) -> str:
    path = tmp_path / "faults.py"
    path.write_text(textwrap.dedent(FAULTS))
    return str(path)


def test_the_transformers_sampler_tells_the_learners_probabilities(tmp_path: Path) -> None:
    found = try_out("transformers", tmp_path)
    assert found.passed
    assert found.moved > 10 * MOVED
    assert [one.temperature for one in (*found.before, *found.after)] == [1.0, 0.7, 1.0, 0.7]
    assert {one.tokens for one in (*found.before, *found.after)} == {16 * 24}


def test_a_sampler_that_never_hears_of_updates_is_found_out(faults: str, tmp_path: Path) -> None:
    found = try_out(f"{faults}:Stale", tmp_path)
    assert held(found.before) == [True, True]
    assert held(found.after) == [False, False]
    assert not found.passed


def test_a_sampler_sleeps_during_the_step_and_must_wake_with_the_new_weights(faults: str, tmp_path: Path) -> None:
    found = try_out(f"{faults}:Forgetful", tmp_path)
    assert held(found.before) == [True, True]
    assert held(found.after) == [False, False]


def test_in_bfloat16_rounding_passes_and_a_missed_update_does_not(faults: str, tmp_path: Path) -> None:
    def found(name: str) -> ParityTrial:
        config = vary(parity_config(name, {}), ("model.dtype=bfloat16",))
        return parity_trial(config, RunFolder.create(tmp_path / name.rpartition(":")[2]))

    sound = found("transformers")
    assert sound.passed, sound
    assert max(parity.largest_gap for parity in sound.before) > 1e-4  # float32's bound
    assert not found(f"{faults}:Stale").passed


def test_a_sampler_that_tells_another_temperatures_probabilities_is_found_out(faults: str) -> None:
    findings = tried_here("sampler", "quickstart", [f"sampler.name={faults}:Raw"])
    assert [one.level for one in findings] == [Level.OK, Level.PROBLEM] * 2
    assert "temperature 0.7" in findings[1].found


def test_numbers_that_are_none_do_not_hold() -> None:
    assert not Parity(temperature=1.0, tokens=1, largest_gap=float("nan"), mean_ratio=1.0).holds(
        BOUNDS["float32", "cpu"]
    )
    assert not Parity(temperature=1.0, tokens=1, largest_gap=0.0, mean_ratio=float("nan")).holds(
        BOUNDS["float32", "cpu"]
    )


def test_a_sampler_that_is_not_there_is_a_problem() -> None:
    (finding,) = tried_here("sampler", "quickstart", ["sampler.name=vlm"])
    assert finding.level is Level.PROBLEM
    assert "Did you mean 'vllm'?" in finding.found


def test_the_options_of_a_configuration_are_tried(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("model: {new: {}}\ntask: {name: ledger}\nsampler: {options: {max_batch: 0}}\n")
    (finding,) = tried_here("sampler", str(path), [])
    assert finding.level is Level.PROBLEM
    assert "the option max_batch is 0" in finding.found


def test_a_missed_update_of_adapters_is_found_out(faults: str, tmp_path: Path) -> None:
    """That those of a run pass: ``test_doctor_gpu.py``."""
    config = vary(parity_config(f"{faults}:Stale", {}), ("model.lora.rank=4",))
    assert not parity_trial(config, RunFolder.create(tmp_path / "run")).passed
