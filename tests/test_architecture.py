"""The floors of the package (docs/explanation/architecture.md): which folder may import which, read from the source.

A rule is one test over all files, and its failure lists the files that break it.
"""

import ast
import subprocess
import sys
import tomllib
from collections import defaultdict
from functools import cache
from pathlib import Path

from packaging.requirements import Requirement

from condensegrpo.core.packages import TRAIN

ROOT = Path(__file__).resolve().parent.parent
TOP = ("condensers", "rewards", "cli", "configs", "studies")  # folders at the top that are packages of condensegrpo
LOOSE = {"__init__", "__main__", "api"}  # the only files beside the folders of condensegrpo
FLOORS = {
    "core": 1,
    "configs": 1,  # holds YAML and no code
    "algorithms": 2,
    "episodes": 2,
    "sandbox": 2,
    "storage": 2,
    "condensers": 2,
    "trackers": 2,
    "config": 3,
    "learner": 3,
    "metrics": 3,
    "vision": 3,
    "attention": 3,
    "tools": 3,
    "rewards": 3,
    "samplers": 4,
    "tasks": 4,
    "assembly": 5,
    "planning": 5,
    "integrations": 5,
    "evaluation": 6,
    "training": 7,
    "reporting": 7,
    "inspection": 7,
    "studies": 8,
    "display": 8,
    "api": 8,
    "cli": 8,
    "__main__": 8,
}
PLUG_INS = {"condensers", "rewards", "tasks", "tools", "integrations", "studies"}
SANDBOX_USERS = {  # beside plug-ins
    "condensegrpo.assembly.build",
    "condensegrpo.assembly.components",
    "condensegrpo.cli.doctor",
    "condensegrpo.config.schema",  # the limits are a section
}
PLUG_IN_LOADERS = {  # beside the assembly
    *("condensegrpo.config.options", "condensegrpo.config.use"),  # sections that build what they name
    *("condensegrpo.cli.init", "condensegrpo.cli.app"),  # --help lists names
    *("condensegrpo.integrations.env_class", "condensegrpo.integrations.gym"),  # what they adapt
}
EFFECTS = {"pathlib", "os", "io", "json", "sys", "logging", "time", "random", "asyncio", "subprocess", "shutil"}
FILE_LOADERS = {f"condensegrpo.{name}" for name in ("core.plugins", "sandbox.candidate", "sandbox.job")}  # of users
SANDBOXED = {  # modules of the sandbox that run in processes of their own
    *("server", "supervisor", "job", "judge", "candidate", "wire", "calls", "program"),
    *("linux", "namespaces", "seccomp", "folders"),
}


@cache
def files() -> dict[str, Path]:
    """Every source file of the package by its module name; a folder's own is called ``….__init__``."""
    paths = {}
    for folder in ("condensegrpo", *TOP):
        for path in sorted((ROOT / folder).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            paths[".".join(parts if folder == "condensegrpo" else ("condensegrpo", *parts))] = path
    return paths


def within(module: str, place: str) -> bool:
    return module == place or module.startswith(place + ".")


def folder(module: str) -> str:
    """The folder of a module of ours: condensegrpo.episodes.episode ─▶ episodes."""
    return module.split(".")[1]


def in_folder(*folders: str) -> list[str]:
    return [module for module in files() if folder(module) in folders]


@cache
def tree(module: str) -> ast.Module:
    return ast.parse(files()[module].read_text(encoding="utf-8"))


@cache
def imports(module: str) -> tuple[str, ...]:
    """What a file imports anywhere in it, within functions and for type checking too, as ``package.module.name``."""
    names: list[str] = []
    for node in ast.walk(tree(module)):
        if isinstance(node, ast.Import):
            names += (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            start = "." * node.level + (node.module or "")
            names += (f"{start}.{alias.name}" for alias in node.names)
    return tuple(names)


def resolved(name: str) -> str | None:
    """The file of ours that an imported name comes from; None: it is a module of others."""
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
    """The files of ours that a file imports, except the package's own ``__init__``, which holds the version."""
    targets = {target for name in imports(module) if (target := resolved(name)) is not None}
    return frozenset(targets - {module, "condensegrpo.__init__"})


def outside(module: str) -> set[str]:
    """The packages of others that a file imports, the standard library left out."""
    tops = {name.split(".")[0] for name in imports(module)}
    return tops - set(sys.stdlib_module_names) - {"condensegrpo"}


def test_beside_the_folders_of_the_package_there_is_nothing() -> None:
    assert {path.stem for path in (ROOT / "condensegrpo").glob("*.py")} <= LOOSE
    assert {folder(module) for module in files()} - set(FLOORS) - LOOSE == set()


def test_a_folder_imports_its_own_floor_and_lower_ones_only() -> None:
    upward = {
        f"{module} ─▶ {other}"
        for module in files()
        for other in ours(module)
        if module != "condensegrpo.__init__" and FLOORS[folder(other)] > FLOORS[folder(module)]
    }
    assert upward == set()


def test_no_folders_import_each_other_in_a_ring() -> None:
    arrows: dict[str, set[str]] = defaultdict(set)
    for module in files():
        arrows[folder(module)] |= {folder(other) for other in ours(module)} - {folder(module)}
    assert ring(arrows) == []


def test_no_files_import_each_other_in_a_ring() -> None:
    assert ring({module: set(ours(module)) for module in files()}) == []


def ring(arrows: dict[str, set[str]]) -> list[str]:
    """Nodes that point at each other in a ring; empty if there is no such ring."""
    done: set[str] = set()

    def search(node: str, path: tuple[str, ...]) -> list[str]:
        if node in path:
            return [*path[path.index(node) :], node]
        if node in done:
            return []
        rings = (search(other, (*path, node)) for other in sorted(arrows.get(node, ())))
        first = next((one for one in rings if one), [])
        done.add(node)
        return first

    return next((one for node in list(arrows) if (one := search(node, ()))), [])


def test_a_ring_is_recognised() -> None:
    assert ring({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == ["b", "c", "b"]
    assert ring({"a": {"b"}, "b": {"c"}}) == []


def test_imports_are_absolute_and_never_by_the_bare_name_of_a_folder_at_the_top() -> None:
    # `import condensers` works from the repository's root and makes a second object of every class
    wrong = {
        f"{module}: {name}"
        for module in files()
        for name in imports(module)
        if name.startswith(".") or any(within(name, top) for top in TOP)
    }
    assert wrong == set()


def test_only_plug_ins_import_plug_ins() -> None:
    wrong = {
        f"{module} ─▶ {other}"
        for module in files()
        for other in ours(module)
        if folder(other) in PLUG_INS - {"integrations"} and folder(module) not in PLUG_INS
    }
    assert wrong == set()


def test_beside_plug_ins_only_the_assembly_and_the_doctor_import_the_sandbox() -> None:
    users = {
        module
        for module in files()
        if folder(module) not in {*PLUG_INS, "sandbox"} and any(folder(other) == "sandbox" for other in ours(module))
    }
    assert users <= SANDBOX_USERS


def test_what_runs_in_the_sandbox_needs_the_standard_library_and_its_neighbours_only() -> None:
    modules = {f"condensegrpo.sandbox.{name}" for name in SANDBOXED}
    assert modules <= files().keys()
    for module in modules:
        assert outside(module) == set(), module
        assert ours(module) <= modules | {"condensegrpo.sandbox.__init__"}, module


def test_only_the_assembly_loads_plug_ins() -> None:
    loaders = {module for module in files() if "condensegrpo.core.plugins" in ours(module)}
    assert loaders - set(in_folder("assembly")) <= PLUG_IN_LOADERS


def test_the_core_needs_the_standard_library_only() -> None:
    assert {module: outside(module) for module in in_folder("core") if outside(module)} == {}


def test_algorithms_need_torch_only_and_do_no_input_or_output() -> None:
    for module in in_folder("algorithms"):
        assert outside(module) <= {"torch", "annotated_types"}, module
        assert not EFFECTS & {name.split(".")[0] for name in imports(module)}, module


def test_the_learner_knows_nothing_of_messages() -> None:
    strangers = ("condensegrpo.core.messages", "condensegrpo.core.protocols")
    for module in in_folder("learner"):
        assert not any(within(name, stranger) for name in ours(module) for stranger in strangers), module


def test_importing_the_package_imports_nothing_else() -> None:
    assert {name for name in imports("condensegrpo.__init__") if not within(name, "condensegrpo.api")} == {
        "importlib.import_module",  # of the names of api.py, when they are first used
        "os",
        "pathlib.Path",  # to tell MKL to be reproducible, before torch is imported
        "typing.TYPE_CHECKING",
        "warnings.filterwarnings",  # of tqdm in a notebook
    }


def test_the_packages_listed_for_installation_are_those_that_exist() -> None:
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]["packages"]
    packages = [module.removesuffix(".__init__") for module in files() if module.endswith(".__init__")]
    assert sorted(listed) == sorted(packages)


def test_every_folder_says_what_it_is_for_what_it_imports_and_where_to_start() -> None:
    for module in files():
        if module.endswith(".__init__") and module.count(".") == 2 and folder(module) != "configs":
            text = ast.get_docstring(tree(module)) or ""
            assert " import" in text, module
            assert "Start with" in text, module


def test_the_core_loads_without_torch() -> None:
    names = ", ".join(module.removesuffix(".__init__") for module in in_folder("core"))
    program = f"import sys, {names}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False, timeout=240, cwd="/").returncode == 0


def at_once(module: str) -> set[str]:
    """What a file imports when it is imported: not within functions, nor for type checking."""
    names = set[str]()
    for node in tree(module).body:
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def reached_from(starts: list[str]) -> set[str]:
    """The files of ours that are imported with some of them."""
    reached, waiting = set[str](), set(starts)
    while waiting:
        reached |= waiting
        names = {name for module in waiting for name in at_once(module)}
        waiting = {target for name in names if (target := resolved(name)) is not None} - reached
    return reached


def test_preparing_a_run_and_planning_it_import_no_deepspeed() -> None:
    """It takes seconds. Imports inside of functions are those of a run that trains."""
    starts = ["condensegrpo.training.run_setup", "condensegrpo.cli.configuration", *in_folder("planning", "assembly")]
    starts.remove("condensegrpo.assembly.open_learner")
    reached = reached_from(starts)
    assert "condensegrpo.learner.model_folder" in reached
    assert "condensegrpo.learner.deepspeed_import" not in reached


WITHOUT_TORCH = {  # functions of commands that need no extra, and what they call; "": all functions of a file
    "condensegrpo.cli.app": "",
    "condensegrpo.cli.configuration": "config_command explain",
    "condensegrpo.cli.runs": "export_rows_command",
    "condensegrpo.cli.init": "init plugins describe_plugin",
    "condensegrpo.cli.inspect": "",
    "condensegrpo.cli.evaluate": "play typed _tokenizer_of",
    "condensegrpo.cli.serve": "proxy _proxy _recorded",
    "condensegrpo.api": "sample_rollouts",
}


def test_commands_that_need_no_extra_import_no_torch() -> None:
    starts = in_folder("inspection", "condensers", "rewards", "tasks", "tools", "trackers", "storage")
    starts += ["condensegrpo.samplers.openai", "condensegrpo.samplers.writers"]  # as plug-ins are, by name
    for module, functions in WITHOUT_TORCH.items():
        starts.append(module)
        for node in ast.walk(tree(module)):
            if isinstance(node, ast.FunctionDef) and (not functions or node.name in functions.split()):
                found = (each for each in ast.walk(node) if isinstance(each, ast.ImportFrom))
                names = (f"{each.module}.{alias.name}" for each in found for alias in each.names)
                starts += [target for name in names if (target := resolved(name)) is not None]
    reached = reached_from(starts)
    assert {"condensegrpo.evaluation.evaluate", "condensegrpo.assembly.preflight"} <= reached
    importing = {module: {name.partition(".")[0] for name in at_once(module)} & TRAIN for module in reached}
    assert {module: names for module, names in importing.items() if names} == {}


def test_the_extra_that_trains_has_the_packages_that_errors_name() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extra = {Requirement(line).name.replace("-", "_") for line in project["optional-dependencies"]["train"]}
    assert extra - {"ninja", "antlr4_python3_runtime"} == TRAIN  # nothing here imports these two


def test_a_vllm_server_watches_for_the_end_of_its_run_before_torch_is_imported() -> None:
    program = (
        "import sys, condensegrpo.samplers.vllm_server.server; sys.exit(len({'torch', 'vllm'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False, timeout=240, cwd="/").returncode == 0


def test_nothing_imports_the_command_line() -> None:
    others = [module for module in files() if folder(module) != "cli"]
    assert {module for module in others if any(folder(other) == "cli" for other in ours(module))} == {
        "condensegrpo.__main__"
    }


def test_no_module_becomes_another_object_when_it_is_imported() -> None:
    # its imports would be hidden from every reader of the source, this file included
    tricks = {
        f"{module}:{node.lineno}: {ast.unparse(node)}"
        for module in files()
        for node in ast.walk(tree(module))
        if isinstance(node, ast.Assign)
        and any(_of_a_module(target) and module not in FILE_LOADERS for target in node.targets)
    }
    assert tricks == set()


def _of_a_module(target: ast.expr) -> bool:
    text = ast.unparse(target)
    return text.startswith("sys.modules[") or text.endswith(".__class__")


def test_no_two_public_classes_share_a_name() -> None:
    places: dict[str, list[str]] = {}
    for module, file in files().items():
        for node in ast.walk(tree(module)) if file.relative_to(ROOT).parts[0] not in ("configs", "studies") else ():
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places.setdefault(node.name, []).append(f"{module}:{node.lineno}")
    assert {name: found for name, found in places.items() if len(found) > 1} == {}
