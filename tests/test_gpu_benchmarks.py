"""The measurements for a GPU: each script runs with toys on a CPU, and what it measured survives its end."""

import argparse
import json
import os
import signal
import time
from contextlib import closing
from functools import partial
from pathlib import Path
from types import ModuleType

import pytest
import torch
from command import succeed
from gpu import colocated, learner_step, rollout_costs, startup
from gpu.policy import SHAPES, random_policy
from gpu.record import recording
from gpu.training import summary, timeline
from gpu.trl_learner import padded_batch
from needs_vllm import needs_vllm
from sides import Side
from tiny import segment
from transformers import AutoConfig, AutoTokenizer

from condensegrpo.assembly.build import build
from condensegrpo.config.load import load_config

RAND = Path(learner_step.__file__).parent / "rand.yaml"
long = pytest.mark.skipif("LONG_TESTS" not in os.environ, reason="starts vLLM several times: LONG_TESTS=1 runs it")


def results(script: ModuleType, folder: Path, *arguments: str) -> list[dict[str, object]]:
    succeed("--out", str(folder), "--models", str(folder), "--rounds", "1", *arguments, program=script.main)
    name = script.__name__.rpartition(".")[2]
    found = [json.loads(line) for line in (folder / f"{name}.jsonl").read_text().splitlines()]
    assert (found[0]["event"], found[-1]["event"]) == ("begins", "ends"), found
    assert [each for each in found if each["event"] == "failed"] == []
    return found


def test_a_script_that_is_over_time_keeps_what_it_found_and_goes_on_after_a_failure(tmp_path: Path) -> None:
    with recording("part", argparse.Namespace(out=tmp_path, seconds=600)) as record:
        with record.attempt(of="memory"):
            raise torch.OutOfMemoryError("none left")
        record.note("found", seconds=1.5)
        assert signal.getitimer(signal.ITIMER_REAL)[0] > 0
        signal.raise_signal(signal.SIGALRM)  # as at the end of these seconds
        record.note("never")
    first, failed, found, last = map(json.loads, (tmp_path / "part.jsonl").read_text().splitlines())
    assert "machine" in first
    assert (failed["event"], failed["of"], failed["error"]) == ("failed", "memory", "OutOfMemoryError: none left")
    assert (found["seconds"], last["event"]) == (1.5, "out of time")


def test_a_process_that_is_killed_is_a_failure_and_the_next_part_follows(tmp_path: Path) -> None:
    with (
        recording("part", argparse.Namespace(out=tmp_path, seconds=600)) as record,
        record.attempt(of="killed"),
        closing(Side(partial(os._exit, 9))) as killed,
    ):
        killed.run()
    _, failed, last = map(json.loads, (tmp_path / "part.jsonl").read_text().splitlines())
    assert (failed["event"], last["event"]) == ("failed", "ends")
    assert "ended with exit code 9" in failed["error"]


def test_a_policy_is_written_once_with_a_token_a_word(tmp_path: Path) -> None:
    folder = random_policy(tmp_path, "toy")
    written = (folder / "model.safetensors").stat().st_mtime_ns
    assert (random_policy(tmp_path, "toy") / "model.safetensors").stat().st_mtime_ns == written
    assert len(AutoTokenizer.from_pretrained(folder)("w1 w2039 elsewhere")["input_ids"]) == 3
    assert AutoConfig.from_pretrained(folder).vocab_size == SHAPES["toy"].vocabulary


def test_a_policy_that_reads_knows_every_text_and_every_token_that_it_samples(tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(random_policy(tmp_path, "toy", reads=True))
    text = "Notes: Mira locker 42; élan"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert len(tokenizer) == SHAPES["toy"].vocabulary
    assert tokenizer.decode([2047]) == "w2047"


def test_the_longest_silence_before_the_first_step_is_named() -> None:
    lines = [
        {"event": "message", "text": "run folder"},
        {"event": "phase", "title": "opening the sampler vllm", "total": None},
        {"event": "step", "step": 1, "metrics": {"seconds": 4.0, "loss": 0.1}},
    ]
    events = list(timeline((json.dumps(line).encode() for line in lines), time.monotonic()))
    assert [(event["kind"], event["what"]) for event in events] == [
        ("message", "run folder"),
        ("phase", "opening the sampler vllm"),
        ("step", "1"),
    ]
    assert (events[2]["seconds"], "loss" in events[2]) == (4.0, False)
    times = ((2.0, 2.0), (3.0, 1.0), (9.0, 6.0))
    timed = [{**event, "since_start": now, "after": after} for event, (now, after) in zip(events, times, strict=True)]
    assert summary(timed) == {"first_step": 9.0, "silence": [6.0, "opening the sampler vllm"], "steps": [4.0]}
    assert summary(timed[:1]) == {"first_step": None, "silence": [2.0, "start"], "steps": []}


def test_rows_are_a_prompt_and_a_reply_with_what_the_tools_said_masked() -> None:
    pytest.importorskip("trl")
    found = padded_batch([segment([5, 6, 7, 8], [1, 3]), segment([9, 4], [1])], pad_id=0, trained=3, device="cpu")
    assert found["prompt_ids"].tolist() == [[5], [9]]
    assert found["completion_ids"].tolist() == [[6, 7, 8], [4, 0, 0]]
    assert found["tool_mask"].tolist() == [[1, 0, 1], [1, 0, 0]]


def test_the_learner_s_step_is_measured_and_profiled(tmp_path: Path) -> None:
    found = results(learner_step, tmp_path, "--programs", "ours", "--workloads", "condensed", "--peak-tflops", "0.1")
    *_, warm, timed = [each for each in found if each["event"] == "step"]
    assert (warm["timed"], timed["timed"], timed["workload"]) == (False, True, "condensed")
    assert 0 < float(str(timed["mfu"])) < 1
    assert timed["rows"] == 40
    (profile,) = [each for each in found if each["event"] == "profile"]
    assert profile["kernels"]
    assert "aten::" in (tmp_path / "profile_toy_0.txt").read_text()


def test_rollouts_are_measured_with_sleep_and_update(tmp_path: Path) -> None:
    found = results(rollout_costs, tmp_path, "--variants", "ours on transformers", "--spreads", "0.45")
    _, timed = [each for each in found if each["event"] == "rollout"]
    assert (timed["timed"], timed["spread"]) == (True, 0.45)
    assert {"seconds", "cpu", "sleep", "update", "step_ms", "tokens_per_second"} <= set(timed)


@pytest.mark.parametrize("overrides", [["sampler.name=transformers"], *colocated.TRAINED.values()])
def test_the_configuration_of_the_first_steps_is_valid(overrides: list[str]) -> None:
    config = load_config(RAND, ["model.path=nowhere", *overrides])
    assert len(build(config).problems("eval")) >= config.evaluate.problems


@long
def test_train_is_timed_from_its_start(tmp_path: Path) -> None:
    small = ["train.problems_per_step=2", "train.samples_per_problem=2", "sampler.name=transformers"]
    found = results(startup, tmp_path, "--runs", "cold", "--", *small)
    (trained,) = [each for each in found if each["event"] == "trained"]
    assert trained["code"] == 0, trained["error"]
    assert len(trained["steps"]) == 2  # type: ignore[arg-type]  # JSON
    titles = [each["what"] for each in found if each.get("kind") == "phase"]
    assert {"opening the sampler transformers", "opening the learner"} <= set(titles)


@needs_vllm
@long
def test_vllm_is_measured_bare_in_process_and_as_a_server(tmp_path: Path) -> None:
    found = results(rollout_costs, tmp_path, "--variants", "ours", "bare", "--spreads", "0.0")
    assert {each["params"] for each in found if each["event"] == "rollout"} == {"", *rollout_costs.ALL}
    found = results(colocated, tmp_path, "--parts", "calls", "--spreads", "0.0")
    timed = {str(each["of"]): each for each in found if each["event"] == "calls" and each["timed"]}
    assert set(timed) == {"in process", "server"}
    assert "update_folder" in timed["server"]
