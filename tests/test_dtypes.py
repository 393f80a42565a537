"""The dtype that is not set: by the device, stored as it was resolved, and said where a GPU trains in another one."""

from pathlib import Path
from typing import Literal

import pytest
from command import succeed

from condensegrpo.config.load import config_on, dump_config, load_config
from condensegrpo.config.schema import RunConfig
from condensegrpo.learner import devices
from condensegrpo.learner.devices import default_dtype, precision_warning
from condensegrpo.training import train as training

QUICKSTART = Path("configs/quickstart.yaml")


def on_gpu(patch: pytest.MonkeyPatch, *, bfloat16: bool | None) -> None:
    """Load configurations as on a machine with such a GPU; None: without one."""
    patch.setattr(devices, "gpu_bfloat16", lambda: bfloat16)
    patch.setattr(training, "gpu_bfloat16", lambda: bfloat16)


def loaded(*overrides: str) -> RunConfig:
    return load_config(QUICKSTART, overrides)


def test_a_dtype_that_is_not_set_is_bfloat16_on_a_gpu_that_computes_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [default_dtype(bfloat16) for bfloat16 in (True, False, None)] == ["bfloat16", "float32", "float32"]
    on_gpu(monkeypatch, bfloat16=None)
    assert loaded().model.dtype == "float32"
    on_gpu(monkeypatch, bfloat16=True)
    assert loaded().model.dtype == loaded("model.dtype=auto").model.dtype == "bfloat16"
    assert loaded("model.dtype=float32").model.dtype == "float32"


def test_a_run_keeps_the_dtype_that_it_started_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    on_gpu(monkeypatch, bfloat16=True)
    (tmp_path / "config.yaml").write_text(dump_config(loaded()))
    on_gpu(monkeypatch, bfloat16=None)
    assert load_config(tmp_path / "config.yaml").model.dtype == "bfloat16"


def test_a_plan_for_another_machine_has_the_dtype_of_that() -> None:
    def on(device: Literal["cpu", "gpu"], dtype: str) -> tuple[str, float | None]:
        config = config_on(device, str(QUICKSTART), (f"model.dtype={dtype}",))
        return config.model.dtype, config.algorithm.importance.cap

    assert on("gpu", "auto") == ("bfloat16", 2.0)
    assert on("cpu", "auto") == on("gpu", "float32") == ("float32", 0.0)
    assert ", bfloat16, ZeRO 0 on 1 × gpu" in succeed("plan", str(QUICKSTART), "--device", "gpu")
    assert ", float32, ZeRO 0 on 1 × cpu" in succeed("plan", str(QUICKSTART), "--device", "cpu")


def test_the_dry_run_shows_the_dtype_and_why() -> None:
    assert "# model and learner compute in float32: the default on this machine" in succeed(
        "train", str(QUICKSTART), "--dry-run"
    )


def test_a_run_on_a_gpu_warns_of_another_dtype() -> None:
    assert precision_warning("float32", None) is precision_warning("bfloat16", True) is None
    assert "compute capability 8.0" in str(precision_warning("float32", False))
    warning = str(precision_warning("float32", True))
    assert warning.startswith("WARNING: training in float32 on a GPU")
    assert "set model.dtype=bfloat16" in warning
