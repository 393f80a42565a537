"""The checks of ``doctor --gpu``, run on a CPU: real ranks, a real learner, and checks that hang or die."""

import json
import os
import re
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
import ranks_with_vllm
from command import succeed, succeed_on_two_ranks
from needs_vllm import needs_vllm
from typer.testing import CliRunner

from condensegrpo.cli import doctor
from condensegrpo.cli.app import app
from condensegrpo.cli.doctor import Finding, Level, run_trial

TINY = ("quickstart", "learner.tokens_per_micro_batch=512", "train.problems_per_step=2", "train.samples_per_problem=2")


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A module that is run in place of a check."""
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    return tmp_path / "faulty_check.py"


def tried(name: str, *arguments: str, folder: Path, start: Callable[..., object] = succeed) -> list[Finding]:
    """The findings of a trial in forks, where ``run_trial`` starts new interpreters."""
    file = folder / "findings.json"
    start(name, str(file), *arguments, program=doctor.main)
    return [Finding(**{**one, "level": Level(one["level"])}) for one in json.loads(file.read_text())]


def with_vllm_on_two_ranks(*arguments: str, program: object) -> None:
    succeed(*arguments, program=ranks_with_vllm.main)


def test_a_machine_without_a_gpu_is_a_problem_with_its_cure() -> None:
    result = CliRunner().invoke(app, ["doctor", "--gpu"])
    assert result.exit_code == 1
    assert "torch 2.13.0+cpu sees none" in result.output
    assert "install the CUDA build of torch" in " ".join(result.output.split())


def test_a_check_on_all_devices_is_a_rank_on_each_and_the_first_reports(module: Path) -> None:
    module.write_text(
        "import json, os, sys\nfinding = {'area': 'ranks', 'level': 'ok', 'found': os.environ['WORLD_SIZE']}\n"
        "os.environ['RANK'] == '0' and open(sys.argv[2], 'w').write(json.dumps([finding]))"
    )
    (finding,) = run_trial("learner", (), ranks=2, module="faulty_check")
    assert (finding.level, finding.found) == (Level.OK, "2")


def test_a_step_of_the_learner_on_all_devices(tmp_path: Path) -> None:
    """Two ranks, which share rows."""
    sharing = ("learner.sequence_parallel=2", "learner.zero_stage=3")
    (finding,) = tried("learner", *TINY, *sharing, folder=tmp_path, start=succeed_on_two_ranks)
    assert finding.level is Level.OK, finding
    assert "a step on 2 ranks in" in finding.found


@pytest.mark.parametrize(
    ("ranks", "sampler"),
    [
        (1, "sampler={name: transformers}"),
        pytest.param(
            *(2, "sampler={name: vllm, options: {engine: {tensor_parallel_size: 2, kv_cache_gib: 0.01}}}"),
            marks=needs_vllm,
        ),
    ],
)
def test_the_sampler_is_held_against_the_learner_before_and_after_a_step(
    ranks: int, sampler: str, tmp_path: Path
) -> None:
    """On every rank, also where ranks share a copy of the model in vLLM (pitfalls 11, 22 and 24)."""
    start = succeed if ranks == 1 else with_vllm_on_two_ranks
    findings = tried("sampler", *TINY, "model.lora.rank=4", sampler, folder=tmp_path, start=start)
    assert [finding.level for finding in findings] == [Level.OK] * 4, findings
    assert {finding.area.partition(",")[2] for finding in findings} == {"" if ranks == 1 else " 2 ranks"}
    assert [finding.found.partition(",")[0] for finding in findings] == ["as loaded"] * 2 + [
        "after an optimiser step"
    ] * 2
    gaps = [float(re.findall(r"from the learner (\S+) nats", finding.found)[0]) for finding in findings]
    assert max(gaps) <= 1e-4


def test_what_a_configuration_lacks_is_a_problem_and_no_traceback(tmp_path: Path) -> None:
    (finding,) = tried("learner", "quickstart", "model.new=null", "model.path=./nowhere", folder=tmp_path)
    assert finding.level is Level.PROBLEM
    assert "nowhere" in finding.found
    assert "Traceback" not in finding.found


def test_a_check_that_hangs_is_ended_with_all_its_processes(module: Path) -> None:
    module.write_text("import subprocess, time; subprocess.Popen(['sleep', '98765']); time.sleep(98765)")
    (finding,) = run_trial("sampler", (), ranks=1, seconds=1.0, module="faulty_check")
    assert finding.found == "no answer after 1 s"
    assert finding.cure.startswith("run it alone")
    left = [process for process in psutil.process_iter(["cmdline"]) if "98765" in (process.info["cmdline"] or ())]
    assert not psutil.wait_procs(left, timeout=240)[1]  # one that was killed is seen until it is reaped


def test_a_check_that_dies_says_how_and_what_it_printed_last(module: Path) -> None:
    module.write_text("import os, signal; print('CUDA error', flush=True); os.kill(os.getpid(), signal.SIGSEGV)")
    (finding,) = run_trial("learner", (), ranks=1, module="faulty_check")
    assert finding.level is Level.PROBLEM
    assert finding.found == "the check ended with code -11: CUDA error"
