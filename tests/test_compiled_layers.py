"""Compiled decoder layers: lengths compile nothing, gradients stay, and a trial decides on a GPU."""

import os
import time
from pathlib import Path

import pytest
import torch
import two_ranks
from command import succeed_on_two_ranks
from packed import computed
from tiny import forking_rows, qwen3
from torch._dynamo.utils import counters

from condensegrpo.algorithms.objective import PerToken, supervised
from condensegrpo.algorithms.packing import lay_out
from condensegrpo.config.checks import check_values
from condensegrpo.config.load import named_config, vary
from condensegrpo.core.errors import ConfigError
from condensegrpo.learner import ranks
from condensegrpo.learner.layers import (
    KEPT_DAYS,
    TRIED,
    CompileTrial,
    affordable_layers,
    agreed_trial,
    checkpoint_layers,
    compile_layers,
    trial_file,
    try_compiling,
)
from condensegrpo.learner.logprobs import CPU, TrainedLogprobs
from condensegrpo.storage.files import keep_compiled

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor"),  # optimizer_step does not show it either
]

BACKEND = "aot_eager"


def test_five_lengths_are_one_graph_of_a_layer_without_a_break() -> None:
    """Micro-batches of trees with one to several buckets; the last layer's activations are kept, the first's not."""
    torch._dynamo.reset()
    counters.clear()
    plain, compiled, graphs = TrainedLogprobs(qwen3()), TrainedLogprobs(qwen3()), []
    compile_layers(compiled.policy, backend=BACKEND)
    checkpoint_layers(compiled.policy, 1)
    for count in (9, 3, 80, 30, 5):
        batch = lay_out([tuple(forking_rows(count, seed=count))])
        for module in (plain, compiled):
            computed(module, batch, 0.9, objective=PerToken(supervised)).loss.backward()
        graphs.append(counters["stats"]["unique_graphs"])
    assert graphs == [1] * 5
    assert not counters["graph_break"]
    for expected, found in zip(plain.parameters(), compiled.parameters(), strict=True):
        torch.testing.assert_close(found.grad, expected.grad, rtol=1e-4, atol=1e-4 * float(expected.grad.abs().max()))


def test_a_trial_compares_layers_and_says_why_layers_are_not_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("condensegrpo.learner.layers.ROW", 16)
    torch._dynamo.reset()
    found = try_compiling(qwen3().config, torch.float32, CPU, kernel="auto", backend="eager")  # Dynamo alone
    assert found.difference is not None
    assert found.difference < 1e-5
    assert found.compiled_seconds is not None
    assert ("are compiled:" in found.describe()) == (found.fault is None)
    broken = try_compiling(qwen3().config, torch.float32, CPU, kernel="auto", backend="no such compiler")
    assert "are not compiled: a trial failed: " in broken.describe()


def test_a_trial_has_fewer_layers_where_four_would_not_fit() -> None:
    config = qwen3().config
    a_layer = sum(4 * weight.numel() for weight in qwen3().model.layers[0].parameters())  # fp32
    for free, layers in ((0, 1), (8 * a_layer, 1), (16 * a_layer, 2), (99 * a_layer, TRIED), (None, TRIED)):
        assert affordable_layers(config, torch.float32, free=free) == layers


def test_ranks_agree_on_a_trial_and_make_it_only_where_one_of_them_has_none(tmp_path: Path) -> None:
    succeed_on_two_ranks("trials", str(tmp_path), program=two_ranks.main)
    for rank in range(2):
        assert torch.load(tmp_path / f"trials_rank{rank}.pt") == (["it is slower"] * 2, 1)


def test_a_trial_is_kept_for_the_model_and_device_that_it_is_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    config = qwen3().config
    files = {trial_file(config, dtype, CPU, kernel="auto") for dtype in (torch.float32, torch.bfloat16) for _ in "ab"}
    assert len(files) == 2
    config._name_or_path = "runs/other/origin/warm"  # of another run
    assert trial_file(config, torch.float32, CPU, kernel="auto") in files
    file = files.pop()
    assert file.is_relative_to(tmp_path / "condensegrpo")
    ranks.join()
    failed, ran = CompileTrial(0.0, None, None, "a trial failed"), CompileTrial(2e-3, 1e-3, 0.0, None)
    assert [agreed_trial(file, lambda made=made: made) for made in (failed, ran, failed)] == [failed, ran, ran]
    month_ago = time.time() - KEPT_DAYS * 24 * 3600 - 60
    os.utime(file, (month_ago, month_ago))  # another driver may be installed
    slower = ran._replace(fault="it is slower")
    assert [agreed_trial(file, lambda: slower), agreed_trial(file, lambda: ran)] == [slower, slower]
    for damaged in ("{", '{"seconds": 1.0}'):  # or of a version with other keys: made again
        file.write_text(damaged)
        assert agreed_trial(file, lambda: ran) == ran


def test_compiled_code_is_kept_in_the_user_s_cache_unless_a_folder_is_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    unset, chosen = dict[str, str](), {"TORCHINDUCTOR_CACHE_DIR": "/mine"}
    for environment in (unset, chosen):
        keep_compiled(environment)
    assert unset == {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "condensegrpo" / "inductor")}
    assert chosen == {"TORCHINDUCTOR_CACHE_DIR": "/mine"}
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))  # no folder: torch's own default stays
    nowhere = dict[str, str]()
    keep_compiled(nowhere)
    assert nowhere == {}


def test_layers_whose_weights_are_gathered_inside_are_not_compiled() -> None:
    config = vary(named_config("quickstart"), ("learner.compile_layers=on", "learner.zero_stage=3"))
    with pytest.raises(ConfigError, match=r"compile_layers: found on, and learner.zero_stage is 3"):
        check_values(config)
