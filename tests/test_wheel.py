"""What is shipped: wheel and source distribution are built from a copy of the tree, and used in an empty folder."""

import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from importlib.metadata import Distribution, PackageNotFoundError, version
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from condensegrpo import __version__

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("condensegrpo", "condensers", "rewards", "cli", "configs", "studies")
FOLDERS = (".github", "benchmarks", "docs", "notebooks", "tests")
FILES = (
    ".dockerignore",
    "Dockerfile",
    *("pyproject.toml", ".pre-commit-config.yaml", "MANIFEST.in", "Makefile", "constraints.txt", "mkdocs.yml"),
    *("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "LICENSE"),
)
UNTRIED = ("kernels",)  # whose tests are skipped where they are missing
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
TRIED = {  # by name, the version of constraints.txt
    canonicalize_name(line.partition("==")[0]): line.partition("==")[2]
    for line in (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    if line and not line.startswith("#")
}


BUILD = """
import os, sys, tarfile
from pathlib import Path
from setuptools import build_meta
target = Path(sys.argv[1])
build_meta.build_wheel(str(target / "wheel"))
build_meta.build_sdist(str(target))
tarfile.open(next(target.glob("*.tar.gz"))).extractall(target / "unpacked", filter="data")
os.chdir(next((target / "unpacked").iterdir()))
build_meta.build_wheel(str(target / "wheel-of-sdist"))
"""


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, the source distribution and its wheel, built in a copy: setuptools leaves files where it builds."""
    source, target = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("built")
    for name in (*PACKAGES, *FOLDERS):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in FILES:
        shutil.copy(ROOT / name, source)
    for leftover in ("runs/quickstart/log.txt", ".typecheck/a.py", "tests/__pycache__/a.pyc", "docs/.cache/a.txt"):
        (source / leftover).parent.mkdir(parents=True, exist_ok=True)
        (source / leftover).touch()
    command = [sys.executable, "-c", BUILD, str(target)]
    done = subprocess.run(command, cwd=source, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "Warning" not in done.stderr
    assert "no files found" not in done.stderr  # of a line of MANIFEST.in
    return target


@pytest.fixture(scope="module")
def installed(built: Path) -> Path:
    """The unpacked wheel."""
    zipfile.ZipFile(next(built.glob("wheel/*.whl"))).extractall(built / "site")
    return built / "site"


def files(root: Path, *folders: str) -> set[Path]:
    """All files of folders but caches, relative to ``root``."""
    found = {file.relative_to(root) for name in folders for file in (root / name).rglob("*") if file.is_file()}
    return {file for file in found if not any(part == "__pycache__" or part.startswith(".") for part in file.parts[1:])}


def test_the_wheel_holds_every_module_and_data_file_and_nothing_else(installed: Path) -> None:
    sources = files(ROOT, *PACKAGES)
    wanted = {Path("condensegrpo", *file.parts[file.parts[0] == "condensegrpo" :]) for file in sources}
    held = files(installed, ".")
    assert {file for file in held if file.parts[0] == "condensegrpo"} == wanted
    assert {file.parts[0].partition("-")[0] for file in held} == {"condensegrpo"}


def test_the_source_distribution_holds_sources_tests_and_docs_and_no_run_or_cache(built: Path) -> None:
    with tarfile.open(next(built.glob("*.tar.gz"))) as archive:
        held = {Path(*Path(member.name).parts[1:]) for member in archive if member.isfile()}
    made = {file for file in held if file.parts[0] in ("PKG-INFO", "setup.cfg", "condensegrpo.egg-info")}
    assert held - made == {*map(Path, FILES), *files(ROOT, *PACKAGES, *FOLDERS)}


def test_the_wheel_of_the_source_distribution_is_that_of_the_tree(built: Path) -> None:
    wheels = [zipfile.ZipFile(next(built.glob(f"{folder}/*.whl"))) for folder in ("wheel", "wheel-of-sdist")]
    of_tree, of_sdist = ({info.filename: info.CRC for info in wheel.infolist()} for wheel in wheels)
    assert of_tree == of_sdist


def test_the_version_is_stated_once_and_every_entry_point_has_its_module(installed: Path) -> None:
    (folder,) = installed.glob("*.dist-info")
    distribution = Distribution.at(folder)
    assert distribution.version == __version__
    assert "version" in PROJECT["dynamic"]
    for point in distribution.entry_points:
        assert (installed / f"{point.module.replace('.', '/')}.py").is_file(), point


def test_dependencies_of_development_are_never_imported() -> None:
    development = {Requirement(line).name for line in PROJECT["optional-dependencies"]["dev"]} - {
        "types-PyYAML",
        "condensegrpo",
    }
    others = [line for name, lines in PROJECT["optional-dependencies"].items() if name != "dev" for line in lines]
    needed = {Requirement(line).name.partition("-")[0] for line in (*PROJECT["dependencies"], *others)}
    only = {name.partition("-")[0] for name in development} - needed
    assert only >= {"build", "pytest", "hypothesis", "playwright", "nbclient"}
    pattern = re.compile(rf"^\s*(?:import|from) ({'|'.join(sorted(only))})\b", re.MULTILINE)
    sources = [ROOT / file for file in files(ROOT, *PACKAGES) if file.suffix == ".py"]
    importing = {file.name for file in sources if pattern.search(file.read_text(encoding="utf-8"))}
    assert importing == {"verifiers_server.py"}  # mcp, which verifiers needs


def test_the_quickstart_is_found_from_an_empty_folder(installed: Path, tmp_path: Path) -> None:
    program = (
        f"import sys; sys.path.insert(0, {str(installed)!r})\n"
        "import condensegrpo\n"
        "from condensegrpo.config.load import find_config\n"
        "from condensegrpo.config.study import find_study\n"
        "from condensegrpo.core.plugins import installed, load_plugin\n"
        "from condensegrpo.condensers.summary import PolicySummary\n"
        "from condensegrpo.cli.app import app\n"
        "assert 'torch' not in sys.modules\n"
        "print(condensegrpo.__file__, find_config('quickstart'), find_study('tiny'), PolicySummary.__module__)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(str(installed)) == 3


def test_every_dependency_has_a_tried_version_that_its_bounds_allow() -> None:
    extras = [line for name, lines in PROJECT["optional-dependencies"].items() if name != "dev" for line in lines]
    for requirement in map(Requirement, (*PROJECT["dependencies"], *extras)):
        if requirement.name in UNTRIED:
            continue
        tried = TRIED.get(canonicalize_name(requirement.name))
        assert tried is not None, f"constraints.txt misses {requirement.name}"
        assert requirement.specifier.contains(tried), requirement


def test_the_tried_versions_can_be_installed_together() -> None:
    """As far as what is installed says; mlflow, of which the tests have the small package, was asked by hand."""
    refused = []
    for name, tried in TRIED.items():
        try:
            distribution = Distribution.from_name(name)
        except PackageNotFoundError:
            continue
        for requirement in map(Requirement, distribution.requires or ()):
            other = TRIED.get(canonicalize_name(requirement.name))
            applies = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
            if distribution.version == tried and other and applies and not requirement.specifier.contains(other):
                refused.append(f"{name}=={tried}: {requirement}, found {other}")
    assert refused == []


@pytest.mark.parametrize("package", ["torch", "transformers", "deepspeed", "pydantic"])
def test_the_tests_run_with_the_tried_versions(package: str) -> None:
    assert version(package).partition("+")[0] == TRIED[package]
