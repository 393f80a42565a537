"""``pip install condensegrpo`` brings no torch: what needs it names the extra ``train``."""

import re
import socket
import sys
from functools import partial
from pathlib import Path

import pytest
from command import run, without_the_extra
from talk import tokenizer
from test_export_rows import a_run

from condensegrpo.core.errors import ConfigError, concise
from condensegrpo.core.failures import failure_of

CURE = "Run pip install 'condensegrpo[train]' (in a clone: pip install -e '.[train]')"


def test_a_command_that_trains_names_the_extra() -> None:
    done = run("train", "quickstart", "--dry-run", program=without_the_extra)
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith("error: importing ")
    assert done.stderr.endswith(f": it is not installed. {CURE}.\n")
    assert "Traceback" not in done.stderr


def test_the_commands_that_need_no_extra_run_without_it(tmp_path: Path) -> None:
    (tmp_path / "replies.yaml").write_text("['<answer> 7 </answer>']")
    tokenizer().save_pretrained(tmp_path / "model")
    recorded = str(a_run(tmp_path / "run").path)
    proxy = ["proxy", "model", "--upstream", "http://localhost:9/v1", "--condenser", "last_k keep_last=1", "--port"]
    with socket.create_server(("127.0.0.1", 0)) as taken:  # the proxy fails when it begins to listen
        port = str(taken.getsockname()[1])
        more = (
            ["plugins"],
            ["explain", "epsilon"],
            ["inspect", recorded, "--plain"],
            ["export-rows", recorded, "--to", "trl"],
            [*proxy, port],
        )
        program = partial(without_the_extra, *more)
        done = run("play", "quickstart", "--replies", "replies.yaml", cwd=tmp_path, program=program)
    assert not (tmp_path / "runs").exists() or not any(
        (tmp_path / "runs").iterdir()
    )  # no folder is in the next one's way
    assert re.fullmatch(rf"error: listening on 127\.0\.0\.1:{port}: .*\n", done.stderr), done.stderr
    shown = (
        "reply      <answer> 7 </answer>",
        "last_k",
        "trajectory",
        "(option of a plug-in)",
        '"completion_ids": [3, 9, 4, 5]',
    )
    positions = [done.stdout.find(text) for text in shown]
    assert positions == sorted(positions), positions
    assert -1 not in positions, positions


def import_solver() -> None:
    import scipy.special

    del scipy


def test_python_and_a_plug_in_name_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "scipy.special", None)
    with pytest.raises(ConfigError) as raised:
        concise(import_solver)()
    assert str(raised.value) == f"importing scipy: it is not installed. {CURE}."
    with pytest.raises(ModuleNotFoundError) as missing:
        import_solver()
    assert failure_of("the reward Brief", missing.value).message == f"importing scipy: it is not installed. {CURE}"


def test_another_missing_module_stays_what_it_is() -> None:
    def import_mine() -> None:
        import a_module_of_mine  # noqa: F401  it is missing

    with pytest.raises(ModuleNotFoundError, match="a_module_of_mine"):
        concise(import_mine)()
