"""The page of the first GPU run: its table is what plans say, its commands and scripts are valid."""

import importlib.util
import re
import shlex
import subprocess
from pathlib import Path

import pytest
from command import ROOT

from condensegrpo.config.load import load_config
from condensegrpo.config.options import check_plugin

PAGE = (ROOT / "docs/how-to/first-gpu-run.md").read_text(encoding="utf-8")
SCRIPTS = re.findall(r"```bash\n(.*?)```", PAGE, re.DOTALL)
LINES = re.findall(r"condensegrpo(?:\.cli)? ((?:train|serve) my.yaml[^\n#&>]*)", "".join(SCRIPTS).replace("\\\n", " "))

spec = importlib.util.spec_from_file_location("plans", ROOT / "docs/scripts/plans.py")
assert spec is not None
assert spec.loader is not None
plans = importlib.util.module_from_spec(spec)
spec.loader.exec_module(plans)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("gpu")
    plans.write_files(PAGE, folder)
    return folder


def test_the_table_is_what_plans_say(folder: Path) -> None:
    assert plans.rewritten(PAGE, folder) == PAGE, "run: python docs/scripts/plans.py docs/how-to/first-gpu-run.md"
    assert PAGE.count("| yes |") == len(plans.RUNS) - 1


@pytest.mark.parametrize("line", LINES)
def test_the_keys_of_a_command_exist(line: str, folder: Path) -> None:
    alone = line.replace("'", "") if line.count("'") == 1 else line  # the last word of bash -c '…'
    overrides = [word for word in shlex.split(alone) if "=" in word]
    assert len(LINES) == 6
    assert "$" not in "".join(overrides).replace("[$URLS]", "")
    valid = [override.replace("$URLS", "http://a:1") for override in overrides]
    config = load_config(folder / "my.yaml", valid)
    supplied = {"model_path": str(config.model.path), "dtype": config.model.dtype}
    assert (
        check_plugin("samplers", config.sampler.name, config.sampler.options, supplied)["dtype"] == config.model.dtype
    )


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_script_is_bash(script: str) -> None:
    subprocess.run(["bash", "-n"], input=script, text=True, check=True, timeout=240)
