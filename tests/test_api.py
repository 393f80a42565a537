"""The Python front door: what a run folder holds as DataFrames, and parts of a run as objects."""

import asyncio
import json
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from builders import ledger_episode, scored, write_tokenizer
from command import run, run_as_the_interpreter, succeed
from talk import said, shown, tokenizer
from transformers import Qwen3Config

import condensegrpo as cg
from condensegrpo.assembly.build import build_components
from condensegrpo.assembly.objects import PARTS, configured, described_objects
from condensegrpo.condensers.whole_units import LastK
from condensegrpo.config.load import named_config
from condensegrpo.core.errors import CheckpointError, CondenseError, ConfigError
from condensegrpo.core.plugin_kinds import KINDS
from condensegrpo.core.plugins import load_plugin
from condensegrpo.core.protocols.task import Problem, Split
from condensegrpo.core.scored_trajectory import ScoredTrajectory
from condensegrpo.core.trajectory import Trajectory
from condensegrpo.samplers.scripted import ScriptedSampler
from condensegrpo.storage.evaluations import stored_evaluations
from condensegrpo.storage.run_folder import JsonlTracker, RunFolder
from condensegrpo.storage.trajectories import Credit, write_credit, write_trajectories
from condensegrpo.tasks.answers import AnswerEnvironment

REPLIES = ["<note> 3 </note>", "<note> 5 </note>", "<answer> 6 </answer>"]


def episode(name: str, total: float) -> ScoredTrajectory:
    group, sample = name.rsplit("/", 1)
    one = ledger_episode(
        REPLIES, ["+2", "done report"], keep_last=1, id=name, group=group, answer="6", sample=int(sample)
    )
    return scored(one, total, correct=float(total > 0), components={"correct": total, "short": 0.1})


@pytest.fixture
def demo(tmp_path: Path) -> cg.Run:
    """Two steps of two trajectories, evaluated after the second one; credit is known of step 1."""
    folder = RunFolder.create(tmp_path / "demo")
    folder.config.write_text("model: {new: {}}\ntask: {name: ledger}\nrollout: {limits: {max_context_tokens: 48}}\n")
    tracker = JsonlTracker(folder.metrics)
    tracker.log(0, {"eval/success": 0.25})
    for step, success in ((1, 0.5), (2, 1.0)):
        tracker.log(step, {"success": success})
        write_trajectories(folder.trajectories(step), [episode(f"{step}/0/{n}", float(n)) for n in (0, 1)])
    tracker.log(2, {"eval/success": 0.75})
    write_credit(
        folder.credit(1),
        [Credit(trajectory=f"1/0/{sample}", advantages=(sample, 0.0, 2.0), weights=(0.1,) * 3) for sample in (0, 1)],
    )
    folder.evaluation(2, "held-out").parent.mkdir(parents=True)
    write_trajectories(folder.evaluation(2, "held-out"), [episode("2/5/0", 1.0)])
    return cg.Run(folder.path)


# --- the page of the reference


SMALL = """
extends: quickstart.yaml
model: {new: {layers: 1}}
warm_start: {steps: 2, turns_per_step: 8, probe_target: null}
train: {steps: 2, problems_per_step: 2, samples_per_problem: 2}
evaluate: {problems: 4, variants: {}}
"""


def test_the_examples_of_the_reference_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "quickstart").write_text(SMALL)  # found before the shipped configuration of this name
    monkeypatch.chdir(tmp_path)
    page = (Path(__file__).parent.parent / "docs" / "reference" / "python.md").read_text(encoding="utf-8")
    names: dict[str, object] = {}
    for block in re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL):
        exec(compile(block, "python.md", "exec"), names)
    stored = stored_evaluations(RunFolder(tmp_path / "runs/quickstart"))
    assert [each.name for each in stored] == ["eval-1", "eval-2", "eval-3", "eval-4"]
    assert stored[0].command.startswith("condensegrpo.evaluate('runs/quickstart', 'evaluate.problems=8', 'eval")
    own = cg.Run("runs/own")
    assert own.steps == (1, 2)
    assert own.config.reward.name == "python:brief"
    assert (own.path / "log.txt").read_text().count("built by this program alone") == 1
    with pytest.raises(CondenseError, match="the name is taken by a run after step 2"):
        cg.train("quickstart", "name=own")
    with pytest.raises(ConfigError, match=r"'python:brief' among the rewards: it is an object of a Python program"):
        cg.train("runs/own", resume=True)


# --- run folders


@pytest.mark.parametrize("library", ["pandas", "polars"])
def test_metrics_have_one_row_a_step_in_both_libraries(demo: cg.Run, library: str) -> None:
    found = demo.metrics(library)
    assert type(found).__module__.startswith(library)
    assert list(found["step"]) == [0, 1, 2]
    assert list(found["eval/success"])[::2] == [0.25, 0.75]
    assert list(found["success"])[1:] == [0.5, 1.0]
    assert found["success"].isna()[0] if library == "pandas" else found["success"][0] is None


def test_trajectories_of_all_steps_or_of_one_or_of_an_evaluation(demo: cg.Run) -> None:
    every = demo.trajectories()
    assert list(every["id"]) == ["1/0/0", "1/0/1", "2/0/0", "2/0/1"]
    assert list(every["step"]) == [1, 1, 2, 2]
    assert list(demo.trajectories(step=2)["id"]) == ["2/0/0", "2/0/1"]
    assert list(demo.trajectories(evaluation="held-out")["id"]) == ["2/5/0"]
    row = every.iloc[1]
    assert (row["correct"], row["score"], row["reward/short"], row["stop"]) == (1.0, 1.0, 0.1, "answered")
    assert (row["turns"], row["condensations"], row["advantage"]) == (3, 1, 1.0)
    assert every["advantage"].isna().tolist() == [False, False, True, True]


def test_turns_have_the_credit_and_the_condensation_of_each(demo: cg.Run) -> None:
    found = demo.turns(step=1, library="polars").filter(trajectory="1/0/1")
    assert found["advantage"].to_list() == [1.0, 0.0, 2.0]
    assert found["units_dropped"].to_list() == [None, None, 1]
    assert found["condensed_from"].to_list()[2] > found["prompt_tokens"].to_list()[2]
    assert found["reply"].to_list() == REPLIES


def test_a_missing_run_step_or_library_is_an_error_that_names_what_there_is(
    demo: cg.Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(CondenseError, match=r"Runs in .*: demo"):
        cg.Run(demo.path.parent / "demi")
    with pytest.raises(CondenseError, match=r"step 7 .* There are steps 1–2"):
        demo.trajectories(step=7)
    with pytest.raises(ConfigError, match="found library='numpy', wanted pandas or polars"):
        demo.metrics("numpy")  # type: ignore[arg-type]  # the refusal is the test
    for name in ("pandas", "polars"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ConfigError, match=r"pandas or polars is not installed\. Run pip install pandas"):
        demo.metrics()


def test_a_trajectory_is_printed_and_drawn_for_a_notebook(demo: cg.Run, capsys: pytest.CaptureFixture[str]) -> None:
    write_tokenizer(demo.path)
    several = demo.rollouts(step=1)
    several[1].show(turn=2, tokens=True)
    shown = capsys.readouterr().out
    assert "turn 2   condensed by last_k" in shown
    assert "turn 1 ──" not in shown
    assert "<answer>" in shown
    several.show()
    assert capsys.readouterr().out.count("1/0/") == 2
    html = several[1]._repr_html_()
    assert "&lt;answer&gt; 6" in html
    assert "<answer>" not in html  # texts of a model are text
    assert "1/0/1" in several._repr_html_()
    assert not [line for line in (shown + re.sub("<.*?>", "", html)).splitlines() if line.endswith(" ")]
    file = demo.path / "trajectories/step_000001.parquet"
    assert repr(several.batch) == f"TrajectoryBatch({str(file)!r}, 'step 1', trajectories=2)"
    assert (len(several[:1]), repr(several[0])) == (1, "Rollout('1/0/0', correct=0, stop='answered')")


def test_importing_the_package_loads_nothing_and_a_run_needs_no_torch() -> None:
    program = """
import subprocess
import sys
import condensegrpo as cg
assert not [name for name in sys.modules if name.startswith("condensegrpo.")], "loaded"
assert {"Run", "rollout", "evaluate", "train"} <= {*dir(cg)}
cg.Run
assert callable(cg.rollout)
assert not {"torch", "pandas", "polars"} & {*sys.modules}, "heavy"
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, cwd="/")
    assert (done.returncode, done.stderr) == (0, "")


# --- objects as parts


class Sums:
    """What is 1 + n? Two problems of each split."""

    def problems(self, split: Split) -> Sequence[Problem]:
        first = {"train": 0, "eval": 2}[split]
        return [Problem(id=f"{n}", question=f"1 + {n}?", answer=f"{n + 1}") for n in range(first, first + 2)]

    def environment(self, problem: Problem) -> AnswerEnvironment:
        return AnswerEnvironment(question=problem.question, system="")


def brevity(trajectory: Trajectory, problem: Problem) -> Mapping[str, float]:
    return {"correct": float(trajectory.answer == problem.answer), "brief": -0.1 * len(trajectory.turns)}


def price(item: str) -> str:
    """Looks up a price.

    Args:
        item: The article.
    """
    return f"{item}: 3"


SPOKEN = {0: '<tool>{"name": "price", "args": {"item": "cup"}}</tool>', 1: "<answer>3</answer>"}


def talk(prompt_ids: tuple[int, ...]) -> list[int]:
    """Writes a call of the tool, then an answer."""
    return said(SPOKEN["cup: 3" in shown(prompt_ids)])


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    Qwen3Config(vocab_size=len(tokenizer())).save_pretrained(folder)  # weights are never loaded
    tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture
def config(tmp_path: Path, model: Path) -> Path:
    """A task that reads files, which a test replaces."""
    tree = {
        "model": {"path": str(model)},
        "task": {"name": "gsm8k", "data": "nowhere.jsonl"},
        "condenser": {"name": "last_k", "options": {"keep_last": 1}},
        "rollout": {
            "limits": {"max_context_tokens": 8000, "max_output_tokens": 200, "max_turns": 3},
            "tools": {"format": "tagged"},
        },
        "evaluate": {"variants": {"other": ["task.options.match=math"], "cold": ["rollout.limits.max_turns=2"]}},
    }
    path = tmp_path / "own.yaml"
    path.write_text(json.dumps(tree))
    return path


def test_a_checkpoints_files_are_compared_with_their_hashes_whatever_samples(config: Path, model: Path) -> None:
    tmp_path = config.parent
    shutil.copytree(model, tmp_path / "checkpoint" / "model")
    size = (model / "config.json").stat().st_size
    written = {"format": 1, "step": 1, "world_size": 1, "zero_stage": 1, "policy": ""}
    listed = {"sizes": {"model/config.json": size}, "hashes": {"model/config.json": "of another file"}}
    (tmp_path / "checkpoint" / "manifest.json").write_text(json.dumps({**written, **listed}))
    chosen = str(tmp_path / "checkpoint" / "model")
    with pytest.raises(CheckpointError, match=r"config\.json its SHA-256 begins"):
        cg.rollout(config, model=chosen, task=Sums(), sampler=ScriptedSampler(talk))


def test_objects_are_parts_of_a_rollout_inside_a_running_event_loop(config: Path) -> None:
    sampler = ScriptedSampler(talk)

    async def cell() -> cg.Rollouts:  # as in a notebook
        return cg.rollout(
            config, n=2, problems=2, task=Sums(), reward=brevity, tools=[price], condenser=LastK(), sampler=sampler
        )

    found = asyncio.run(cell())
    assert [each.id for each in found] == ["0/0/0", "0/0/1", "0/1/0", "0/1/1"]
    assert [each.score.correct for each in found] == [1.0, 1.0, 0.0, 0.0]
    assert found[0].score.components == {"correct": 1.0, "brief": pytest.approx(-0.2)}
    assert "cup: 3" in found[0].trajectory.turns[0].observations[0].content
    assert found[0].batch.provenance is not None
    assert found[0].batch.provenance.condenser == "python:LastK"
    assert list(found.trajectories()["problem"]) == ["2", "2", "3", "3"]


def test_a_warm_start_is_probed_inside_a_running_event_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a notebook, where a loop runs in the thread of the cells."""
    monkeypatch.chdir(tmp_path)
    short = ("warm_start.steps=1", "warm_start.turns_per_step=2", "warm_start.probe_target=0.0001", "train.steps=0")

    async def cell() -> None:
        cg.train("quickstart", *short, "warm_start.max_rounds=1", "evaluate.problems=1", "evaluate.variants={}")

    asyncio.run(cell())
    assert (tmp_path / "runs/quickstart/origin/warm").is_dir()


def test_rollouts_that_cannot_begin_leave_no_folder(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (made := tmp_path / "temporary").mkdir()
    (file := tmp_path / "mine.py").write_text("def sampler():\n    raise OSError('no server answers')\n")
    monkeypatch.setattr(tempfile, "tempdir", str(made))
    with pytest.raises(CondenseError, match="no server answers"):
        cg.rollout(config, f"sampler.name={file}:sampler", task=Sums(), reward=brevity, tools=["calculator", price])
    assert [*made.iterdir()] == []


def test_an_evaluation_under_a_launcher_is_refused_before_it_samples(
    config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="a launcher started 2 processes"):
        cg.evaluate(config)


def test_an_evaluation_takes_objects_too(config: Path) -> None:
    result = cg.evaluate(
        config, samples=2, task=Sums(), reward=brevity, tools=["calculator", price], sampler=ScriptedSampler(talk)
    )
    assert (result.problems, result.samples, result.success) == (2, 2, 0.5)


def test_a_part_that_raises_is_named_without_an_option_of_the_command_line(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    calls = count(1)

    def broken(trajectory: object, problem: object) -> dict[str, float]:
        if next(calls) > 3:  # those of the rehearsal
            raise ValueError("no such day")
        return {"broken": 1.0}

    with pytest.raises(CondenseError, match="the reward broken: ValueError: no such day"):
        cg.rollout(config, task=Sums(), reward=broken, tools=[price], sampler=ScriptedSampler(talk))
    assert "failed (reward_error): the reward broken" in (shown := " ".join(capsys.readouterr().err.split()))
    assert "--debug" not in shown


def test_problems_of_ones_own_are_posed(config: Path) -> None:
    own = [Problem(id="mine", question="1 + 2?", answer="3")]
    one: Any = np.int64(1)  # as of a table
    only = cg.rollout(config, n=one, problems=own, task=Sums(), tools=[price], sampler=ScriptedSampler(talk))[0]
    assert (only.trajectory.problem_id, only.score.correct) == ("mine", 1.0)


class Broken:
    """A task whose constructor and environment are wrong."""

    class Nested:
        """A class that no name of the module stands for."""

    def problems(self, split: Split) -> Sequence[Problem]:
        raise KeyError("column")

    def environment(self, problem: Problem) -> None: ...


@pytest.mark.parametrize(
    ("parts", "overrides", "message"),
    [
        ({"task": Broken.Nested}, (), r"found the class Nested of .*test_api, which no file has that can be imported"),
        ({"taks": Sums()}, (), "there is no part 'taks'. Did you mean 'task'"),
        ({"task": Sums()}, ("task.options.size=3",), "found the options size, and it is an object"),
        ({"task": Sums()}, ("rollout.workers.processes=2",), "found processes=2, .* python:Sums is an object"),
        ({"task": Broken()}, (), r"making the train problems of the task: KeyError: 'column' \(.*test_api.py:\d+\)"),
        ({"task": Sums(), "reward": object()}, (), "object has no method of a reward"),
        ({"task": Sums()}, ({"train.steps": 3},), "found {'train.steps': 3}, wanted overrides such as 'train.steps=3'"),
        ({"task": Sums(), "sampler": object()}, (), "python:object: object has no sample"),
        ({"task": Sums(), "n": 1.0}, (), r"n is 1\.0, wanted a whole number of at least 1"),
        ({"task": Sums(), "problems": 0}, (), "problems is 0, wanted a whole number of at least 1"),
        ({"task": Sums(), "observer": 3}, (), "the observer: int has no phase, advance, step, evaluated"),
    ],
)
def test_a_wrong_part_says_what_is_wrong_with_it(
    config: Path, parts: dict[str, object], overrides: tuple[str, ...], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        cg.rollout(config, *overrides, **parts)  # type: ignore[arg-type]  # the refusal is the test


# --- a program, and the command line after it


@pytest.mark.parametrize(
    "call",
    [
        lambda: cg.Run("nope"),
        lambda: cg.train("nope"),
        lambda: cg.train(None),  # type: ignore[arg-type]  # the refusal is the test
        lambda: cg.rollout("quickstart", "train.stepz=1"),
        lambda: cg.evaluate("nope"),
    ],
)
def test_every_error_shows_the_line_of_the_user_and_the_line_that_raises(call: Callable[[], object]) -> None:
    with pytest.raises(CondenseError) as caught:
        call()
    assert [frame.path == Path(__file__) for frame in caught.traceback] == [True, True, False]
    assert caught.value.__cause__ is None


def test_errors_of_a_runs_methods_and_properties_show_no_line_of_the_package(demo: cg.Run) -> None:
    (demo.path / "config.yaml").write_text("nope: 1\n")
    first = demo.rollouts(1)[0]
    (demo.path / "trajectories/step_000001.parquet").unlink()
    calls: tuple[Callable[[], object], ...] = (
        lambda: demo.config, lambda: demo.model, lambda: demo.rollouts(9), lambda: demo.metrics("nope"),  # type: ignore[arg-type]  # the refusal is the test
        lambda: demo.turns(9), lambda: first.scored, lambda: first.show(),
    )  # fmt: skip
    for call in calls:
        with pytest.raises(CondenseError) as caught:
            call()
        modules = [frame.frame.f_globals["__name__"] for frame in caught.traceback]
        assert sum(module.startswith("condensegrpo.") for module in modules) == 1  # the line that raises


MINE = """
class Brief:
    def __init__(self, most=8):
        self.most = most
    def __call__(self, trajectory, problem):
        return {"correct": 1.0, "brief": float(len(trajectory.turns) < self.most)}
"""
PROGRAM = """
import condensegrpo as cg
from mine import Brief

SHORT = ("train.steps=0", "warm_start.steps=0", "train.eval_every=0", "evaluate={problems: 1}", "algorithm={}")
cg.train("quickstart", "name=classy", *SHORT, reward={"name": Brief, "options": {"most": 5}})
cg.train("quickstart", "name=objective", *SHORT, "train.stepz=1", reward=Brief())
"""


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The folder of a program that trains with a class and then fails, and what it wrote to standard error."""
    folder = tmp_path_factory.mktemp("program")
    (folder / "mine.py").write_text(MINE)
    (folder / "program.py").write_text(PROGRAM)
    done = run(cwd=folder, program=partial(run_as_the_interpreter, folder / "program.py"))
    assert done.returncode == 1
    return folder, done.stderr


def test_a_run_that_was_given_a_class_is_evaluated_from_the_command_line(program: tuple[Path, str]) -> None:
    folder, _ = program
    assert cg.Run(folder / "runs/classy").config.reward.name == f"{folder}/mine.py:Brief"
    evaluated = json.loads(succeed("eval", str(folder / "runs/classy"), "--json"))
    assert evaluated["success"] == 1


def test_an_error_shows_the_line_of_the_program_and_the_message_alone(program: tuple[Path, str]) -> None:
    _, stderr = program
    traceback = stderr[stderr.index("Traceback") :]
    assert "[rank0]" not in stderr
    assert 'program.py", line 7, in <module>' in traceback
    assert "stepz: unknown key. Did you mean 'steps'?" in traceback
    assert traceback.count("File ") == 2  # and the line that raises


def test_what_a_class_cannot_be_named_by_or_an_object_needs_is_said(tmp_path: Path) -> None:
    config = named_config("quickstart")
    (line,) = described_objects(config, {"python:brevity": brevity})
    assert line.startswith("built by this program alone: brevity. condensegrpo eval needs them by name")
    assert described_objects(config, {}) == ()
    with pytest.raises(ConfigError, match=r"On the command line name its class in a file, as in reward\.name=path/to/"):
        load_plugin("rewards", "python:brevity")


def test_what_is_said_of_a_tool_that_is_an_object_can_be_typed(tmp_path: Path) -> None:
    """It was ``tool=…`` and ``rollout.tools.use=path/to/file.py:Name``; neither is taken."""
    own, objects = configured("quickstart", (), {"tools": [price]})

    def refused(tools: Any) -> None:
        wrong, given = configured("quickstart", (), {"tools": tools})
        build_components(wrong, objects=given)

    (line,) = described_objects(own, objects)
    (named,) = re.findall(r"as in (\S+), unless", line)
    with pytest.raises(ConfigError, match=r"resume=True, tools=\[…\]\)\. .* the function or its class") as missing:
        build_components(own)
    (override,) = re.findall(r"as in (\S+)\.$", str(missing.value))
    file = tmp_path / "mine.py"
    file.write_text('def look_up(word: str) -> str:\n    """Looks.\n\n    Args:\n        word: what.\n    """\n')
    for typed in (named.replace("mine.py", str(file)), override.replace("path/to/file.py:Name", f"{file}:look_up")):
        settings, none = configured("quickstart", (typed,), {})
        assert build_components(settings, objects=none).toolbox.names == ("look_up",)
    assert build_components(own, objects=objects).toolbox.names == ("price",)
    with pytest.raises(ConfigError, match="a tool with options is a class whose __call__ is the tool"):
        refused([{"name": price, "options": {"currency": "EUR"}}])
    with pytest.raises(ConfigError, match="python:int: found 3, wanted a function with type hints and a docstring"):
        refused([3])


def test_what_is_said_of_a_plug_in_of_a_program_names_keys_that_exist(tmp_path: Path) -> None:
    """It was ``losse=…``, ``estimator.name=…`` and others for kinds that no argument takes."""
    for kind in KINDS:
        with pytest.raises(ConfigError) as missing:
            load_plugin(kind, "python:Mine")
        key, _, value = re.findall(r"as in (\S+)\.$", str(missing.value))[0].partition("=")
        section: Any = named_config("quickstart").model_dump()
        for part in key.split("."):
            section = section[part]
        assert section is None or isinstance(section, str | list | tuple)
        assert isinstance(section, list | tuple) == value.startswith("[")
        arguments = re.findall(r"resume=True, (\w+)=", str(missing.value))
        assert set(arguments) <= {*PARTS}
