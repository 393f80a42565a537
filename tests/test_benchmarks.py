"""The learner's benchmark: rows are what training would make, gradients agree, figures mean what they say."""

import json
import re
import subprocess
import sys
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from types import ModuleType

import learner
import pytest
import rollout
import torch
from command import succeed
from devices import measured_peak, mfu, peak_flops, peak_of, utilisation
from flops import computed_flops, sampling_flops, useful_flops
from learner import OUTPUT_ONLY, SHARED, WHOLE, Measured, difference, disagreeing, ratio, table
from passes import ModelSize, padded, sorted_batches
from tiny import segment
from token_columns import columns
from worker import Reading
from workloads import LENGTHS, QUICK_LENGTHS, Kind, Workload, workload

from condensegrpo.core.trajectory import Segment

ROOT = Path(__file__).resolve().parent.parent
KINDS = pytest.mark.parametrize("kind", list(Kind))


def made(kind: Kind, *, seed: int = 0) -> Workload:
    return workload(kind, LENGTHS[kind], questions=1, vocabulary=32768, seed=seed)


def readings(*seconds: float, peak: int = 0, off: float | None = 0.0) -> Measured:
    return Measured(readings=tuple(Reading(each, peak, None) for each in seconds), off=off)


@KINDS
def test_rows_are_the_same_for_the_same_seed_and_others_for_another(kind: Kind) -> None:
    assert made(kind, seed=3) == made(kind, seed=3)
    assert made(kind, seed=3) != made(kind, seed=4)


def test_the_vocabulary_changes_tokens_and_no_lengths() -> None:
    small, large = (
        workload(Kind.CONDENSED, LENGTHS[Kind.CONDENSED], questions=1, vocabulary=size, seed=0).rows
        for size in (100, 151936)
    )
    assert [columns(row).trained for row in small] == [columns(row).trained for row in large]
    assert max(token for row in small for token in row.token_ids) < 100


@KINDS
@pytest.mark.parametrize("seed", range(5))
def test_contexts_fit_and_all_rows_of_a_question_begin_with_it(kind: Kind, seed: int) -> None:
    load = made(kind, seed=seed)
    contexts = [columns(row).trained.index(True) for row in load.apart]
    assert len(contexts) == 8 * 6
    assert max(contexts) <= 512
    shortest = min(contexts)  # that of a first turn: the question alone
    assert 96 <= shortest <= 192
    assert len({row.token_ids[:shortest] for row in load.apart}) == 1


def test_condensed_turns_are_rows_of_their_own_from_the_third_on_and_appended_ones_are_one_row() -> None:
    condensed, append = made(Kind.CONDENSED), made(Kind.APPEND)
    assert [row.first_turn for row in condensed.rows] == [0, 2, 3, 4, 5] * 8  # nothing to drop before turn 2
    assert [row.first_turn for row in append.rows] == [0] * 8


def test_appended_contexts_continue_the_last() -> None:
    rows = made(Kind.APPEND).apart
    for last, row in pairwise(rows[:6]):
        assert row.token_ids[: len(last.token_ids)] == last.token_ids


@KINDS
def test_turns_apart_train_the_same_tokens_with_the_same_weights_as_the_rows(kind: Kind) -> None:
    load = made(kind)

    def trained(rows: Sequence[Segment]) -> list[tuple[int, float, float]]:
        return [
            (row.token_ids[place], turn.advantage, turn.weight)
            for row in rows
            for turn in row.turns
            for place in turn.positions
        ]

    assert trained(load.rows) == trained(load.apart)
    assert {turn.weight for row in load.rows for turn in row.turns} == {1 / (8 * 6 * 2 * 64)}
    # 4 of 8 are right
    assert {round(turn.advantage, 2) for row in load.rows for turn in row.turns} == {-0.94, 0.94}


def test_the_median_output_is_the_one_asked_for() -> None:
    rows = workload(Kind.CONDENSED, LENGTHS[Kind.CONDENSED], questions=20, vocabulary=32768, seed=0).apart
    outputs = sorted(row.trained for row in rows)
    assert 58 <= outputs[len(outputs) // 2] <= 70


def test_padding_is_on_the_right_and_places_predict_the_trained_tokens() -> None:
    ids, places = padded([segment([5, 6, 7], [2]), segment([8, 9], [1])])
    assert ids.tolist() == [[5, 6, 7], [8, 9, 0]]
    assert places.tolist() == [1, 3]


def test_rows_of_like_length_are_padded_together_within_the_budget() -> None:
    rows = [segment(range(length), [1]) for length in (2, 9, 3, 8)]
    found = [[len(row.token_ids) for row in batch] for batch in sorted_batches(rows, 18)]
    assert found == [[9, 8], [3, 2]]
    assert [len(batch) for batch in sorted_batches(rows, 1)] == [1, 1, 1, 1]


def test_useful_arithmetic_is_counted_once_for_shared_tokens() -> None:
    size = ModelSize(layers=1, hidden=2, heads=1, kv_heads=1, head=2, ffn=1, vocabulary=10)
    weights = 4 * (2 * 2) + 3 * 2  # q, k, v, o and the three of the feed-forward part
    head = 6 * 2 * 10 * 2
    # a row of 3 tokens has 1 + 2 + 3 pairs; its sibling adds one token that looks at 3
    once = 6 * weights * 4 + 12 * 2 * (6 + 3) + head
    assert useful_flops(size, [segment([1, 2, 3], [2]), segment([1, 2, 4], [2])]) == once
    assert useful_flops(size, [segment([1, 2, 3], [2]), segment([5, 2, 4], [2])]) > once


def test_rows_alone_and_checkpointed_layers_are_more_arithmetic() -> None:
    size = ModelSize(layers=2, hidden=2, heads=1, kv_heads=1, head=2, ffn=1, vocabulary=10)
    rows = [segment([1, 2, 3], [2]), segment([1, 2, 4], [2])]
    assert computed_flops(size, rows, shares=True, checkpointed=0) == useful_flops(size, rows)
    head, decoder = 6 * 2 * 10 * 2, 6 * 44 * 6 + 12 * 2 * 2 * 12  # of 6 tokens and 12 pairs
    assert computed_flops(size, rows, shares=False, checkpointed=1) == head + decoder + decoder / 6


def test_sampling_computes_every_token_of_a_trajectory_once() -> None:
    size = ModelSize(layers=1, hidden=2, heads=1, kv_heads=1, head=2, ffn=1, vocabulary=10)
    weights = 4 * (2 * 2) + 3 * 2
    # a prompt of 2 and a reply of 1, then a prompt of 4 that continues them and a reply of 2: 6 tokens, 3 sampled
    waves = [[((1, 2), 1)], [((1, 2, 3, 4), 2)]]
    assert sampling_flops(size, waves) == 2 * weights * 6 + 4 * 2 * (1 + 2 + 3 + 4 + 5 + 6) + 2 * 2 * 10 * 3
    with pytest.raises(ValueError, match="does not continue"):
        sampling_flops(size, [[((1, 2), 1)], [((9, 2, 3, 4), 2)]])


def test_mfu_is_the_arithmetic_over_what_the_device_could_do_in_that_time() -> None:
    """3e12 FLOPs in 2 s on 5e12 FLOP/s; 382 trained tokens in 2 s; 1e9 FLOPs in 2 s on 1e12 FLOP/s."""
    assert utilisation(3e12, 2.0, 5e12) == pytest.approx(0.3)
    assert (mfu(3e12, 2.0, 5e12), mfu(3e12, 2.0, None)) == ("30.0%", "–")
    heads, [line] = table({SHARED: readings(2.0)}, trained=382, flops=1e9, peak=1e12)
    shown = dict(zip(heads, line, strict=True))
    assert (shown["trained tokens/s"], shown["useful GFLOP/s"], shown["MFU"]) == ("191", "0.5", "0.1%")


def test_the_peak_is_the_card_s_the_one_given_or_on_a_cpu_measured() -> None:
    names = {
        "NVIDIA H100 80GB HBM3": 989.4,
        "NVIDIA H100 PCIe": 756.0,
        "NVIDIA H200": 989.4,
        "NVIDIA H20": 148.0,
        "NVIDIA A100-SXM4-80GB": 312.0,
        "NVIDIA L4": 121.0,
        "NVIDIA L40S": 362.0,
        "NVIDIA GH200 480GB": 989.4,
    }
    assert {name: peak_flops(name) for name in names} == {name: tflops * 1e12 for name, tflops in names.items()}
    assert peak_flops("Tesla V100-SXM2-16GB") is None
    assert peak_of("cpu", dtype="float32", tflops=2.5) == 2.5e12
    assert 1e8 < measured_peak(torch.float32, size=64) < 1e14


@pytest.mark.parametrize("script", [learner, rollout])
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there_is_an_error_that_says_so(script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["benchmark", "--device", "cuda"])
    with pytest.raises(SystemExit, match="finds no GPU, wanted one"):
        script.main()


def test_a_ratio_is_taken_within_rounds_and_not_between_medians() -> None:
    assert ratio(readings(10, 40, 12), readings(5, 10, 4)) == 3  # of 2, 4 and 3; the medians' would be 2.4
    assert ratio(readings(10, 40), readings(5, 10, 1)) == 3  # the slow one ran in two rounds only


def test_gradients_that_differ_are_named_and_nan_is_no_agreement() -> None:
    measured = {WHOLE: readings(1), SHARED: readings(1, off=2e-5), OUTPUT_ONLY: readings(1, off=float("nan"))}
    assert disagreeing(measured, 1e-5) == [SHARED.name, OUTPUT_ONLY.name]
    assert disagreeing({WHOLE: readings(1, off=1e-6)}, 1e-5) == []


def test_a_difference_is_relative_to_the_largest_entry_or_to_the_norm(tmp_path: Path) -> None:
    torch.save([torch.tensor([3.0]), torch.tensor([4.5])], tmp_path / "found.pt")
    wanted = [torch.tensor([3.0]), torch.tensor([4.0])]
    assert difference(wanted, tmp_path / "found.pt", None) == 0.125
    assert difference(wanted, tmp_path / "none.pt", 5.5) == pytest.approx(0.1)


def test_the_script_prints_its_tables_and_all_gradients_agree() -> None:
    out = succeed("--quick", "--rounds", "1", program=learner.main)
    assert "All gradients agree" in out
    for name in ("condensed-32k", "condensed-152k", "append-32k"):
        assert f"**{name}**" in out
    lines = [line.split(" | ") for line in out.splitlines() if line.startswith("| ")]
    own = [line for line in lines if line[0].startswith("| learner's ")]
    assert len(own) == 3 + 1 + 4
    assert all(len(line) == 8 and float(line[7].removesuffix(" |")) < 1e-5 for line in own)
    assert all(float(line[6].removesuffix("%")) > 0 for line in own)


def test_the_profile_names_the_operators_of_the_step() -> None:
    out = succeed("--quick", "--profile", "--workloads", "append-32k", program=learner.main)
    # sizes of the toy model: a head, its width, its words; which operators are among the slowest differs by machine
    assert re.search(r"^ *aten::\w+  .*\[\[[\d, ]*\b(16|32|512)\]", out, re.MULTILINE)


def test_short_rows_are_short() -> None:
    load = workload(Kind.CONDENSED, QUICK_LENGTHS[Kind.CONDENSED], questions=1, vocabulary=512, seed=0)
    assert max(len(row.token_ids) for row in load.rows) < 128


def test_the_script_of_mbpp_judges_solutions_in_plain_python_and_in_the_sandbox(tmp_path: Path) -> None:
    solutions = {
        "def twice(x):\n    return 2 * x": "assert twice(3) == 6",
        "def half(x):\n    return x": "assert half(4) == 2",
    }
    rows = [
        {"task_id": number, "text": "?", "code": code, "test_list": [test], "test_setup_code": ""}
        for number, (code, test) in enumerate(solutions.items())
    ]
    data = tmp_path / "mbpp.jsonl"
    data.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    line = [sys.executable, "benchmarks/mbpp.py", str(data), "--isolation", "none"]
    done = subprocess.run(line, capture_output=True, text=True, cwd=ROOT, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert "1 of 2 solutions pass in plain Python, 2 tests; not: [1]" in done.stdout
    assert "1 pass in the sandbox, of those that pass in plain Python 1" in done.stdout
    assert "0 pass with their bodies removed" in done.stdout
