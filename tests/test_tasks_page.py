"""The pages of tasks and tools against the code: their example trains, and every task and tool is there."""

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest
from builders import trajectory, turn
from command import ROOT, succeed
from formats import TOOL_FORMATS, answers
from recipe_world import make_model

from condensegrpo.assembly.build import build
from condensegrpo.config.load import load_config
from condensegrpo.core import plugins
from condensegrpo.core.messages import Message
from condensegrpo.core.protocols.task import Problem
from condensegrpo.storage.run_folder import read_metrics

TASKS, TOOLS = ((ROOT / "docs" / "reference" / name).read_text(encoding="utf-8") for name in ("tasks.md", "tools.md"))


TUTORIAL = (ROOT / "docs" / "tutorials" / "your-own-task.md").read_text(encoding="utf-8")


def block(kind: str, number: int = 0) -> str:
    return str(re.findall(rf"```{kind}\n(.*?)```", TUTORIAL, re.DOTALL)[number])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the files of the tutorial."""
    folder = tmp_path_factory.mktemp("shop")
    (folder / "shop.py").write_text(block("python"))
    (folder / "own.py").write_text(block("python", 1))
    (folder / "shop.yaml").write_text(block("yaml"))
    return folder


def module(folder: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("shop", folder / "shop.py")
    assert spec is not None
    assert spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


def test_the_task_the_tool_and_the_reward_are_one_file_of_forty_lines() -> None:
    assert len(block("python").splitlines()) <= 40


def test_the_example_can_be_assembled_and_its_tool_called(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    components = build(load_config(Path("shop.yaml")))
    train, held_out = components.task.problems("train"), components.task.problems("eval")
    assert (len(train), len(held_out)) == (4 * 97 - 60, 60)
    assert not {one.question for one in train} & {one.question for one in held_out}
    call = '<tool_call>{"name": "price", "arguments": {"item": "%s"}}</tool_call>'
    given = answers(components.toolbox, call % "lamp" + call % "car")
    assert [message.content for message in given.messages] == ["25", "Error: price: KeyError: 'car'"]


@pytest.mark.parametrize(("answer", "looked", "worth"), [("24", True, 1.0), ("24", False, 0.5), ("25", True, 0.0)])
def test_the_reward_of_the_example_pays_a_look_at_the_price(
    folder: Path, answer: str, looked: bool, worth: float
) -> None:
    seen = [Message(role="tool", content="12", tool_call_id="call_0", name="price")] if looked else []
    one = trajectory(turn([1], [2], observations=seen), turn([1], [2]), answer=answer)
    reward = module(folder).LookedUp()
    assert reward(one, Problem(id="b", question="?", answer="24")) == {"looked_up": worth}


def test_the_example_trains(folder: Path) -> None:
    make_model(folder / "model", steps=20)
    small = (
        f"model.path={folder / 'model'}",
        "rollout.limits.max_output_tokens=24",
        "rollout.limits.max_context_tokens=1200",
        "train.steps=2",
        "train.problems_per_step=1",
        "train.samples_per_problem=2",
        "train.eval_on_start=false",
        "train.eval_every=0",
        "evaluate.problems=1",
        "learner.threads=1",
    )
    assert f"# estimator grpo: the default where reward.name is {folder / 'shop.py'}:LookedUp" in succeed(
        "train", "shop.yaml", *small, "--dry-run", cwd=folder
    )
    succeed("train", "shop.yaml", *small, cwd=folder)
    lines = [line for line in read_metrics(folder / "runs/shop/metrics.jsonl") if "rows" in line]
    assert [line["step"] for line in lines] == [1, 2]
    assert all("reward/looked_up" in line for line in lines)


@pytest.mark.parametrize("name", [point.name for point in plugins.installed("tasks")])
def test_every_task_is_on_its_page(name: str) -> None:
    assert f"`{name}`" in TASKS


@pytest.mark.parametrize("name", [*(point.name for point in plugins.installed("tools")), *TOOL_FORMATS])
def test_every_tool_and_every_format_is_on_its_page(name: str) -> None:
    assert f"| `{name}` |" in TOOLS
