"""What is installed: the wheel is built from a copy of the sources, unpacked, and used in an empty folder."""

import shutil
import subprocess
import sys
import tomllib
import zipfile
from importlib.metadata import Distribution, version
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from condensegrpo import __version__

ROOT = Path(__file__).resolve().parent.parent
MAPPED = ("condensers", "rewards", "cli", "configs")  # folders at the top that are packages of condensegrpo
UNTRIED = ("kernels", "ray")  # whose tests are skipped where they are missing
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
TRIED = {  # by name, the version of constraints.txt
    canonicalize_name(line.partition("==")[0]): line.partition("==")[2]
    for line in (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    if line and not line.startswith("#")
}


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The unpacked wheel; setuptools leaves files where it builds, so it builds in a copy."""
    source, target = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("installed")
    for name in ("condensegrpo", *MAPPED):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    build = f"from setuptools import build_meta; print(build_meta.build_wheel({str(target)!r}))"
    done = subprocess.run([sys.executable, "-c", build], cwd=source, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "Warning" not in done.stderr
    (wheel,) = target.glob("*.whl")
    zipfile.ZipFile(wheel).extractall(target / "site")
    return target / "site"


def test_the_wheel_holds_every_module_and_data_file_and_nothing_else(installed: Path) -> None:
    wanted = {
        Path("condensegrpo", *file.relative_to(ROOT).parts[top == "condensegrpo" :])
        for top in ("condensegrpo", *MAPPED)
        for file in (ROOT / top).rglob("*")
        if file.is_file() and "__pycache__" not in file.parts
    }
    held = {file.relative_to(installed) for file in installed.rglob("*") if file.is_file()}
    assert {file for file in held if file.parts[0] == "condensegrpo"} == wanted
    assert {file.parts[0].partition("-")[0] for file in held} == {"condensegrpo"}


def test_the_version_is_stated_once_and_every_entry_point_has_its_module(installed: Path) -> None:
    (folder,) = installed.glob("*.dist-info")
    distribution = Distribution.at(folder)
    assert distribution.version == __version__
    assert "version" in PROJECT["dynamic"]
    for point in distribution.entry_points:
        assert (installed / f"{point.module.replace('.', '/')}.py").is_file(), point


def test_the_quickstart_is_found_from_an_empty_folder(installed: Path, tmp_path: Path) -> None:
    program = (
        f"import sys; sys.path.insert(0, {str(installed)!r})\n"
        "import condensegrpo\n"
        "from condensegrpo.config.load import find_config\n"
        "from condensegrpo.core.plugins import installed, load\n"
        "from condensegrpo.condensers.summary import PolicySummary\n"
        "from condensegrpo.cli.app import app\n"
        "assert 'torch' not in sys.modules\n"
        "print(condensegrpo.__file__, find_config('quickstart'), PolicySummary.__module__)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(str(installed)) == 2


def test_every_dependency_has_a_tried_version_that_its_bounds_allow() -> None:
    extras = [line for name, lines in PROJECT["optional-dependencies"].items() if name != "dev" for line in lines]
    for requirement in map(Requirement, (*PROJECT["dependencies"], *extras)):
        if requirement.name in UNTRIED:
            continue
        tried = TRIED.get(canonicalize_name(requirement.name))
        assert tried is not None, f"constraints.txt misses {requirement.name}"
        assert requirement.specifier.contains(tried), requirement


@pytest.mark.parametrize("package", ["torch", "transformers", "deepspeed", "pydantic"])
def test_the_tests_run_with_the_tried_versions(package: str) -> None:
    assert version(package).partition("+")[0] == TRIED[package]
