"""``pip install condensegrpo`` brings no torch: what needs it names the extra ``train``."""

import sys

import pytest
from command import run, without_the_extra

from condensegrpo.core.errors import ConfigError, concise
from condensegrpo.core.failures import failure_of

CURE = "Run pip install 'condensegrpo[train]' (in a clone: pip install -e '.[train]')"


def test_a_command_that_trains_names_the_extra() -> None:
    done = run("train", "quickstart", "--dry-run", program=without_the_extra)
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith("error: importing ")
    assert done.stderr.endswith(f": it is not installed. {CURE}.\n")
    assert "Traceback" not in done.stderr


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
        import a_module_of_mine  # noqa: F401

    with pytest.raises(ModuleNotFoundError, match="a_module_of_mine"):
        concise(import_mine)()
