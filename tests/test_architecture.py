"""The floors of the house (docs/architecture.md): who may import whom, read from the source of every file."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
BARE = ("condensers", "rewards", "cli", "configs")  # folders at the top that are packages of condensegrpo

# A file stands on the floor of the longest prefix of its module name; a file that none fits fails a test below.
FLOORS = {
    # 0 words and data: standard library only
    "condensegrpo.__init__": 0,
    "condensegrpo.errors": 0,
    "condensegrpo.messages": 0,
    "condensegrpo.trajectory": 0,
    "condensegrpo.protocols": 0,
    "condensegrpo.plugins": 0,
    "condensegrpo.names": 0,
    "condensegrpo.account": 0,
    "condensegrpo.configs": 0,  # holds YAML and no code
    # 1 pure maths: torch
    "condensegrpo.advantages": 1,
    "condensegrpo.losses": 1,
    "condensegrpo.objective": 1,
    "condensegrpo.segments": 1,
    "condensegrpo.packing": 1,
    "condensegrpo.prefix_tree": 1,
    "condensegrpo.metrics": 1,
    "condensegrpo.bootstrap": 1,
    "condensegrpo.estimates": 1,
    "condensegrpo.information": 1,
    "condensegrpo.refetches": 1,
    "condensegrpo.diagnostics": 1,
    "condensegrpo.memory": 1,
    "condensegrpo.zero": 1,
    "condensegrpo.schedule": 1,
    # 2 edges: files and what a person writes
    "condensegrpo.codec": 2,
    "condensegrpo.config": 2,
    "condensegrpo.yaml_tree": 2,
    "condensegrpo.section": 2,
    "condensegrpo.storage": 2,
    "condensegrpo.tracking": 2,
    "condensegrpo.placeholder": 2,
    # 3 plug-ins
    "condensegrpo.condensers": 3,
    "condensegrpo.rewards": 3,
    "condensegrpo.tasks": 3,
    "condensegrpo.tools": 3,
    "condensegrpo.sandbox": 3,
    # 4 rollout
    "condensegrpo.rollout": 4,
    "condensegrpo.samplers": 4,
    "condensegrpo.credit": 4,
    "condensegrpo.attention": 4,
    # 5 learner
    "condensegrpo.learner": 5,
    # 6 loops
    "condensegrpo.ahead": 6,
    "condensegrpo.ahead_files": 6,
    "condensegrpo.architecture": 6,
    "condensegrpo.assemble": 6,
    "condensegrpo.collect": 6,
    "condensegrpo.compare": 6,
    "condensegrpo.comparison": 6,
    "condensegrpo.comparison_plot": 6,
    "condensegrpo.data_order": 6,
    "condensegrpo.evaluate": 6,
    "condensegrpo.evaluation": 6,
    "condensegrpo.fitting": 6,
    "condensegrpo.observer": 6,
    "condensegrpo.origin": 6,
    "condensegrpo.open_learner": 6,
    "condensegrpo.consistency": 6,
    "condensegrpo.parity": 6,
    "condensegrpo.path_sizes": 6,
    "condensegrpo.plan": 6,
    "condensegrpo.report": 6,
    "condensegrpo.rig": 6,
    "condensegrpo.scorers": 6,
    "condensegrpo.learning_signal": 6,
    "condensegrpo.rollout_parts": 6,
    "condensegrpo.step_sampling": 6,
    "condensegrpo.step_credit": 6,
    "condensegrpo.step_update": 6,
    "condensegrpo.train": 6,
    "condensegrpo.warm_start": 6,
    # 7 command line
    "condensegrpo.cli": 7,
}
PLUG_INS = (
    "condensegrpo.condensers",
    "condensegrpo.rewards",
    "condensegrpo.tasks",
    "condensegrpo.tools",
)
SANDBOX_USERS = {"condensegrpo.assemble", "condensegrpo.cli.doctor_sandbox"}  # beside plug-ins: one sets, one tries it
LOADERS = {"condensegrpo.assemble", "condensegrpo.cli.plugins"}


@cache
def files() -> dict[str, Path]:
    """Every source file of the package by its module name; a folder's own is called ``….__init__``."""
    found = {}
    for folder in ("condensegrpo", *BARE):
        for path in sorted((ROOT / folder).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            found[".".join(parts if folder == "condensegrpo" else ("condensegrpo", *parts))] = path
    return found


def within(module: str, place: str) -> bool:
    return module == place or module.startswith(place + ".")


def floor(module: str) -> int | None:
    places = [place for place in FLOORS if within(module, place)]
    return FLOORS[max(places, key=len)] if places else None


@cache
def imports(module: str) -> tuple[str, ...]:
    """What a file imports anywhere in it, within functions and for type checking too, as ``package.module.name``."""
    names: list[str] = []
    for node in ast.walk(ast.parse(files()[module].read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names += (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            start = "." * node.level + (node.module or "")
            names += (f"{start}.{alias.name}" for alias in node.names)
    return tuple(names)


def resolved(name: str) -> str | None:
    """The file of ours that an imported name comes from; None: it is somebody else's."""
    if not within(name, "condensegrpo"):
        return None
    while name:
        for candidate in (name, f"{name}.__init__"):
            if candidate in files():
                return candidate
        name = name.rpartition(".")[0]
    return None


@cache
def ours(module: str) -> frozenset[str]:
    """The files of ours that a file imports."""
    return frozenset(found for name in imports(module) if (found := resolved(name)) is not None) - {module}


def outside(module: str) -> set[str]:
    """The packages of others that a file imports, the standard library left out."""
    tops = {name.split(".")[0] for name in imports(module)}
    return tops - set(sys.stdlib_module_names) - {"condensegrpo"}


def on_floor(level: int) -> list[str]:
    return [module for module in files() if floor(module) == level]


def test_the_package_is_found() -> None:
    assert {"condensegrpo.errors", "condensegrpo.losses.__init__", "condensegrpo.condensers.__init__"} <= files().keys()


@pytest.mark.parametrize("module", files())
def test_every_file_stands_on_a_floor(module: str) -> None:
    assert floor(module) is not None, (
        f"{files()[module].relative_to(ROOT)} stands on no floor: put it into a folder that does, or add it to FLOORS "
        f"here and to docs/architecture.md"
    )


@pytest.mark.parametrize("module", files())
def test_a_file_imports_its_own_floor_and_lower_ones_only(module: str) -> None:
    level = floor(module)
    above = {other: floor(other) for other in ours(module) if (floor(other) or 0) > (level or 0)}
    assert not above, f"{module} stands on floor {level} and imports from above: {above}"


@pytest.mark.parametrize("module", files())
def test_nobody_imports_a_folder_at_the_top_by_its_bare_name(module: str) -> None:
    # `import condensers` works from the repository's root and makes a second object of every class
    bare = [name for name in imports(module) if any(within(name, folder) for folder in BARE)]
    assert not bare, f"{module} imports {bare}, wanted condensegrpo.…"


@pytest.mark.parametrize("module", files())
def test_imports_are_absolute(module: str) -> None:
    assert not [name for name in imports(module) if name.startswith(".")]


@pytest.mark.parametrize("module", [module for module in files() if floor(module) != 3])
def test_the_engine_never_imports_a_plug_in(module: str) -> None:
    found = [other for other in ours(module) for place in PLUG_INS if within(other, place)]
    assert not found, f"{module} imports {found}: plug-ins are found by name, in assemble.py"


@pytest.mark.parametrize("module", [module for module in files() if floor(module) != 3])
def test_of_the_engine_only_who_sets_and_who_tries_the_sandbox_imports_it(module: str) -> None:
    if any(within(other, "condensegrpo.sandbox") for other in ours(module)):
        assert module in SANDBOX_USERS


SERVED = ("server", "keeper", "job", "script", "judge", "callee", "plain", "wire", "watch", "captured", "setting")
CONFINING = ("linux", "namespaces", "landlock", "seccomp", "syscalls", "limits", "ran")


@pytest.mark.parametrize("name", [*SERVED, *CONFINING])
def test_what_runs_in_the_sandbox_needs_the_standard_library_and_its_neighbours_only(name: str) -> None:
    module = f"condensegrpo.sandbox.{name}"
    allowed = {f"condensegrpo.sandbox.{one}" for one in (*SERVED, *CONFINING)} | {"condensegrpo.sandbox.__init__"}
    assert outside(module) == set()
    assert ours(module) <= allowed


@pytest.mark.parametrize("module", [module for module in files() if not within(module, "condensegrpo.cli")])
def test_nothing_but_the_command_line_imports_the_command_line(module: str) -> None:
    assert not [other for other in ours(module) if within(other, "condensegrpo.cli")]


@pytest.mark.parametrize("module", files())
def test_only_the_assembly_loads_plug_ins(module: str) -> None:
    if "condensegrpo.plugins" in ours(module):
        assert module in LOADERS


@pytest.mark.parametrize("module", on_floor(0))
def test_words_and_data_need_the_standard_library_only(module: str) -> None:
    assert outside(module) == set()


@pytest.mark.parametrize("module", on_floor(1))
def test_maths_needs_torch_only_and_does_no_input_or_output(module: str) -> None:
    assert outside(module) <= {"torch"}
    effects = {"pathlib", "os", "io", "json", "sys", "logging", "time", "random", "asyncio", "subprocess", "shutil"}
    assert not effects & {name.split(".")[0] for name in imports(module)}


@pytest.mark.parametrize("module", on_floor(5))
def test_the_learner_knows_nothing_of_messages(module: str) -> None:
    strangers = ("condensegrpo.messages", "condensegrpo.protocols", "condensegrpo.rollout", "condensegrpo.samplers")
    assert not [other for other in ours(module) for place in strangers if within(other, place)]


def test_importing_the_package_imports_nothing_else() -> None:
    assert imports("condensegrpo.__init__") == ()


def cycle() -> list[str]:
    """Files that import each other in a ring; empty if there is no such ring."""
    done: set[str] = set()

    def search(module: str, path: tuple[str, ...]) -> Iterator[list[str]]:
        if module in path:
            yield [*path[path.index(module) :], module]
        elif module not in done:
            for other in sorted(ours(module)):
                yield from search(other, (*path, module))
            done.add(module)

    return next((ring for module in files() for ring in search(module, ())), [])


def test_no_files_import_each_other_in_a_ring() -> None:
    assert cycle() == []


def test_the_packages_listed_for_installation_are_those_that_exist() -> None:
    import tomllib

    listed = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]["packages"]
    assert sorted(listed) == sorted(
        module.removesuffix(".__init__") for module in files() if module.endswith(".__init__")
    )


def test_the_words_and_data_load_without_torch() -> None:
    names = ", ".join(module.removesuffix(".__init__") for module in on_floor(0))
    program = f"import sys, {names}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False, timeout=60, cwd="/").returncode == 0
