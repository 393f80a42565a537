"""Plug-ins by name and by file, what a person reads when one is not there, and errors that must survive pickling."""

import importlib
import json
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

from condensegrpo.config.options import build_plugin
from condensegrpo.core import errors
from condensegrpo.core.errors import CondenseError, ContextOverflow, PluginError, PrefixBroken
from condensegrpo.core.plugin_kinds import KINDS
from condensegrpo.core.plugins import forget_edited, installed, load_plugin

CONDENSER = '''
"""A condenser in one file."""

class Shortest:
    """Keeps nothing but ``units``."""

    def __init__(self, units: int, *, marker: str = "…") -> None:
        if units < 0:
            raise ValueError(f"units must not be negative, found {units}")
        self.units, self.marker = units, marker
'''


@pytest.fixture
def condenser_file(tmp_path: Path) -> Path:
    path = tmp_path / "my_condenser.py"
    path.write_text(CONDENSER, encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("kind", "names"),
    [
        ("condensers", {"full", "last_k"}),
        ("rewards", {"correct", "format", "inverse_max_context", "weighted_sum"}),
        ("tasks", {"ledger", "gsm8k", "jsonl"}),
        ("tools", {"calculator"}),
        ("samplers", {"transformers", "scripted"}),
        ("trackers", {"jsonl"}),
    ],
)
def test_our_own_plug_ins_are_installed_like_anybody_elses(kind: str, names: set[str]) -> None:
    assert names <= {point.name for point in installed(kind)}


@pytest.mark.parametrize("kind", KINDS)
def test_installed_plug_ins_come_in_the_order_of_their_names(kind: str) -> None:
    names = [point.name for point in installed(kind)]
    assert names == sorted(names)


@pytest.mark.parametrize(
    ("kind", "name"), [(kind, point.name) for kind in KINDS for point in installed(kind) if kind != "samplers"]
)
def test_every_installed_plug_in_but_the_samplers_can_be_imported(kind: str, name: str) -> None:
    assert callable(load_plugin(kind, name))


def test_a_name_gives_the_very_object_that_its_package_holds() -> None:
    from condensegrpo.condensers.whole_units import LastK

    assert load_plugin("condensers", "last_k") is LastK


def test_a_near_miss_names_what_was_meant() -> None:
    with pytest.raises(PluginError, match=r"'last-k' among the condensers: not installed\. Did you mean 'last_k'\?"):
        load_plugin("condensers", "last-k")


def test_a_wild_miss_lists_what_there_is_and_how_to_name_a_file() -> None:
    with pytest.raises(PluginError, match=r"not installed\. Installed: .*full, .*path/to/file\.py:Name") as caught:
        load_plugin("condensers", "zzz")
    assert "Did you mean" not in str(caught.value)


def test_a_file_without_a_name_in_it_is_answered_with_that_alone() -> None:
    with pytest.raises(PluginError) as caught:
        load_plugin("rewards", "mine.py")
    assert str(caught.value) == (
        "looking for 'mine.py' among the rewards: it names a file, wanted what in it: mine.py:Name."
    )


def test_an_unknown_option_lists_those_that_exist(condenser_file: Path) -> None:
    with pytest.raises(
        PluginError, match=r"no option 'unitz'\. Did you mean 'units'\? Its options are: units, marker='…'"
    ):
        build_plugin("condensers", f"{condenser_file}:Shortest", {"units": 1, "unitz": 2})


def test_a_missing_option_is_named(condenser_file: Path) -> None:
    with pytest.raises(PluginError, match=r"the option units is missing"):
        build_plugin("condensers", f"{condenser_file}:Shortest", {})


def test_a_value_that_a_plug_in_refuses_is_shown_with_its_reason(condenser_file: Path) -> None:
    with pytest.raises(PluginError, match=r"with \{'units': -1\}: units must not be negative, found -1"):
        build_plugin("condensers", f"{condenser_file}:Shortest", {"units": -1})


def test_a_plug_in_in_a_file_is_built_with_its_options(condenser_file: Path) -> None:
    made = build_plugin("condensers", f"{condenser_file}:Shortest", {"units": 2, "marker": "-"})
    assert (made.units, made.marker) == (2, "-")


def test_a_file_is_imported_once_so_that_its_classes_stay_the_same(condenser_file: Path) -> None:
    name = f"{condenser_file}:Shortest"
    assert load_plugin("condensers", name) is load_plugin("condensers", name)


def test_files_that_were_edited_are_imported_anew_where_a_run_begins_and_not_inside_of_one(tmp_path: Path) -> None:
    """The second run of a notebook used the class as it was at the first."""
    name = f"{tmp_path}/p.py:VALUES"
    (tmp_path / "p.py").write_text("from helper import A\nVALUES = (A, 1)\n")
    (tmp_path / "helper.py").write_text("A = 1\n")
    assert load_plugin("rewards", name) == (1, 1)
    (tmp_path / "p.py").write_text("from helper import A, B\nVALUES = (A, B)\n")
    (tmp_path / "helper.py").write_text("A, B = 2, 3\n")
    assert load_plugin("rewards", name) == (1, 1)
    forget_edited()
    assert load_plugin("rewards", name) == (2, 3)
    (tmp_path / "helper.py").write_text("A, B = 20, 30\n")
    forget_edited()
    assert load_plugin("rewards", name) == (20, 30)
    forget_edited()
    assert load_plugin("rewards", name) is load_plugin("rewards", name)


def test_files_of_the_same_name_in_two_folders_are_two_plug_ins(tmp_path: Path) -> None:
    for folder in ("one", "two"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "mine.py").write_text(f"def where() -> str:\n    return {folder!r}\n", encoding="utf-8")
    assert [build_plugin("tools", f"{tmp_path / folder / 'mine.py'}:where", {}) for folder in ("one", "two")] == [
        "one",
        "two",
    ]


def test_a_relative_path_is_taken_from_the_working_folder(
    condenser_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(condenser_file.parent)
    assert load_plugin("condensers", "my_condenser.py:Shortest") is load_plugin(
        "condensers", f"{condenser_file}:Shortest"
    )


def test_files_in_two_folders_import_each_the_neighbour_beside_it(tmp_path: Path) -> None:
    for folder in ("first", "second"):
        (tmp_path / folder / "parts").mkdir(parents=True)
        (tmp_path / folder / "helpers.py").write_text(
            f"from parts.names import NAME\nHELP = '{folder} {{}}'.format(NAME)"
        )
        (tmp_path / folder / "parts/names.py").write_text(f"NAME = '{folder[::-1]}'")
        (tmp_path / folder / "plug_in.py").write_text("from helpers import HELP\nclass Reward:\n    help = HELP\n")
    (tmp_path / "second/other.py").write_text("import helpers\nclass Reward:\n    module = helpers\n")
    before = list(sys.path)
    first, second = (
        load_plugin("rewards", f"{tmp_path}/{folder}/plug_in.py:Reward").help for folder in ("first", "second")
    )
    assert (first, second) == ("first tsrif", "second dnoces")
    shared = load_plugin("rewards", f"{tmp_path}/second/other.py:Reward").module
    assert shared.HELP == "second dnoces"
    assert sys.path == before


def test_a_file_in_a_package_imports_relative_to_it_and_by_the_name_of_the_package(tmp_path: Path) -> None:
    (tmp_path / "project/rewards").mkdir(parents=True)
    for file in ("__init__.py", "rewards/__init__.py", "base.py"):
        (tmp_path / "project" / file).write_text("HELP = 'first'")
    (tmp_path / "project/rewards/mine.py").write_text(
        "from ..base import HELP\nfrom project.base import HELP as again\nclass Reward:\n    help = HELP, again\n"
    )
    before = list(sys.path)
    assert load_plugin("rewards", f"{tmp_path}/project/rewards/mine.py:Reward").help == ("first", "first")
    assert sys.path == before


def test_what_is_installed_below_the_folder_of_a_plug_in_stays_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A virtual environment may be in the project, and a folder with data beside a plug-in have a package's name."""
    for folder in (".venv/installed", "rewards/installed"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / ".venv/installed/__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path / ".venv")
    package = importlib.import_module("installed")
    for file in ("one.py", "rewards/two.py"):
        (tmp_path / file).write_text("class Reward:\n    pass\n")
        load_plugin("rewards", f"{tmp_path / file}:Reward")
    assert sys.modules["installed"] is package


def test_a_neighbour_with_the_name_of_an_imported_module_is_not_imported(tmp_path: Path) -> None:
    (tmp_path / "json.py").write_text("dumps = None")
    (tmp_path / "plug_in.py").write_text("import json\nclass Reward:\n    dumps = json.dumps\n")
    assert load_plugin("rewards", f"{tmp_path}/plug_in.py:Reward").dumps is json.dumps


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(PluginError, match=r"there is no file .*nothing\.py"):
        load_plugin("rewards", f"{tmp_path / 'nothing.py'}:Reward")


def test_the_folder_of_a_user_who_does_not_exist_holds_no_plug_in() -> None:
    with pytest.raises(PluginError, match=r"there is no file .*~nobody-of-that-name/mine.py"):
        load_plugin("condensers", "~nobody-of-that-name/mine.py:Mine")


def test_a_file_without_the_object_lists_what_it_holds(condenser_file: Path) -> None:
    with pytest.raises(
        PluginError, match=r"looking for 'Longest' in .*my_condenser\.py: no such name; it holds Shortest"
    ):
        load_plugin("condensers", f"{condenser_file}:Longest")


def test_a_file_that_fails_on_import_says_why_and_may_be_mended(tmp_path: Path) -> None:
    path = tmp_path / "broken.py"
    path.write_text("raise RuntimeError('out of coffee')\n", encoding="utf-8")
    with pytest.raises(PluginError, match="importing .*broken.py: RuntimeError: out of coffee"):  # noqa: RUF043  dots are any letters
        load_plugin("tools", f"{path}:tool")
    path.write_text("def tool() -> int:\n    return 42  # mended\n", encoding="utf-8")
    assert load_plugin("tools", f"{path}:tool")() == 42


def test_a_file_that_is_no_python_is_refused(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("hello", encoding="utf-8")
    with pytest.raises(PluginError, match=r"notes\.txt: it is not a Python file"):
        load_plugin("tools", f"{tmp_path / 'notes.txt'}:tool")


def test_a_plug_in_from_a_file_survives_pickling_in_its_process(condenser_file: Path) -> None:
    made = build_plugin("condensers", f"{condenser_file}:Shortest", {"units": 3})
    assert pickle.loads(pickle.dumps(made)).units == 3


def test_looking_for_plug_ins_imports_no_torch() -> None:
    program = (
        "import sys; from condensegrpo.core import plugins as p; [p.installed(k) for k in p.KINDS];"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False, timeout=240).returncode == 0


def every_error() -> list[type[CondenseError]]:
    return [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, CondenseError)]


@pytest.mark.parametrize("kind", every_error())
def test_every_error_comes_back_from_another_process_with_its_words(kind: type[CondenseError]) -> None:
    back = pickle.loads(pickle.dumps(kind("training: found 3, wanted 4; add one")))
    assert type(back) is kind
    assert str(back) == "training: found 3, wanted 4; add one"


@pytest.mark.parametrize(
    "error",
    [
        PrefixBroken.at(turn=1, position=2, expected=10, found=None),
        ContextOverflow.at(turn=3, tokens=900, budget=512),
    ],
)
def test_errors_from_named_constructors_come_back_too(error: CondenseError) -> None:
    back = pickle.loads(pickle.dumps(error))
    assert (type(back), str(back)) == (type(error), str(error))


def test_the_tree_in_the_docstring_is_the_tree_of_the_classes() -> None:
    def tree(kind: type[CondenseError], depth: int) -> list[tuple[int, str]]:
        below = [line for sub in kind.__subclasses__() if sub in every_error() for line in tree(sub, depth + 1)]
        return [(depth, kind.__name__), *below]

    drawn = [line for line in (errors.__doc__ or "").splitlines() if "Error" in line or "─" in line]
    names = [(line.replace("│", " ").replace("├── ", "    ").replace("└── ", "    ")) for line in drawn]
    depths = [((len(line) - len(line.lstrip())) // 4 - 1, line.split()[0]) for line in names if line.startswith("    ")]
    assert depths == tree(CondenseError, 0)


def test_broken_prefix_says_what_was_held_found_and_what_to_do() -> None:
    words = str(PrefixBroken.at(turn=4, position=17, expected=5, found=6))
    for part in (
        "turn 4",
        "turn 3",
        "token 17",
        "holds 6",
        "had 5",
        "build the prompt from token ids",
        "Turn.condensation",
    ):
        assert part in words


@pytest.mark.parametrize(
    ("body", "found"),
    [
        ("raise KeyError('level')", r"KeyError: 'level' \(.*broken\.py:3\)\."),
        ("raise SystemExit(3)", r"SystemExit: 3 \(.*broken\.py:3\)\."),
        ("raise ValueError('wanted a level.')", r"wanted a level \(.*broken\.py:3\)\.$"),
    ],
)
def test_what_a_constructor_raises_is_shown_with_its_line(tmp_path: Path, body: str, found: str) -> None:
    path = tmp_path / "broken.py"
    path.write_text(f"class Broken:\n    def __init__(self):\n        {body}\n", encoding="utf-8")
    with pytest.raises(PluginError, match=f"setting up the reward '.*:Broken': {found}"):
        build_plugin("rewards", f"{path}:Broken", {})


def test_a_name_that_is_no_class_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "values.py"
    path.write_text("value = 3", encoding="utf-8")
    with pytest.raises(PluginError, match="found 3, wanted a class"):
        build_plugin("rewards", f"{path}:value", {})


@pytest.mark.parametrize(
    "signature",
    ["completions, **kwargs", "data_source, solution_str, ground_truth, extra_info=None"],
)
def test_a_reward_function_as_other_trainers_take_it_is_told_what_one_takes_here(
    tmp_path: Path, signature: str
) -> None:
    path = tmp_path / "own.py"
    path.write_text(f"def paid({signature}): ...\ndef made(bonus): ...\n", encoding="utf-8")
    with pytest.raises(
        PluginError, match=r"own.py:1\): it is a function of \(.*\). A reward is one of \(trajectory, problem\)\.$"
    ):
        build_plugin("rewards", f"{path}:paid", {})
    called = r"bonus is missing.* is called once, with its options, and returns the plug-in\. A function of \(traj"
    with pytest.raises(PluginError, match=called):
        build_plugin("rewards", f"{path}:made", {})


def test_a_function_of_a_trajectory_and_its_problem_is_a_reward(tmp_path: Path) -> None:
    path = tmp_path / "own.py"
    path.write_text(
        "def paid(trajectory, problem, *, most: int = 4): return min(len(trajectory), most)\n", encoding="utf-8"
    )
    assert build_plugin("rewards", f"{path}:paid", {})(range(9), None) == 4
    assert build_plugin("rewards", f"{path}:paid", {"most": 6})(range(9), None) == 6
    with pytest.raises(PluginError, match="the option most is 'a', wanted an integer"):
        build_plugin("rewards", f"{path}:paid", {"most": "a"})


def test_a_function_with_an_option_of_such_a_name_makes_a_reward(tmp_path: Path) -> None:
    path = tmp_path / "own.py"
    path.write_text("def made(completions: int = 4): return ('reward', completions)\n", encoding="utf-8")
    assert build_plugin("rewards", f"{path}:made", {}) == ("reward", 4)
    assert build_plugin("rewards", f"{path}:made", {"completions": 2}) == ("reward", 2)


def test_a_module_in_place_of_a_file_is_answered_with_the_form_that_is_wanted() -> None:
    with pytest.raises(PluginError, match=r"there is no file .*A plug-in in a file is written path/to/file\.py:Name"):
        load_plugin("rewards", "mine:Brief")
