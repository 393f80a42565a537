"""The sandbox of a configuration is a value of its own: no other configuration in the process changes it."""

from pathlib import Path

from builders import trajectory, turn
from formats import answers

from condensegrpo.assembly.build import build_components
from condensegrpo.assembly.components import Components
from condensegrpo.config.load import evaluations, load_config
from condensegrpo.core.protocols.reward import RewardResult
from condensegrpo.core.protocols.task import Problem
from condensegrpo.sandbox.calls import SandboxLimits

CONFIG = "model: {path: nowhere}\ntask: {name: ledger}\n"
RUNS_CODE = "rollout: {tools: {use: [python], format: code}}\nreward: {name: correct, options: {match: tests}}\n"
PRINT_MEMORY = "```python\nimport resource\nprint(resource.getrlimit(resource.RLIMIT_AS)[0] >> 20)\n```"
NEEDS_200_MIB = "def size(n): return len(bytearray(n << 20)) >> 20"
PROBLEM = Problem(id="p", question="?", data={"tests": ["assert size(200) == 200"], "entry": ["size"]})


def built(folder: Path, text: str) -> Components:
    path = folder / "demo.yaml"
    path.write_text(CONFIG + text)
    return build_components(load_config(path))


def memory_of_the_tool(built: Components) -> int:
    (message,) = answers(built.toolbox, PRINT_MEMORY).messages
    return int("".join(filter(str.isdigit, message.content)))


def reward(built: Components) -> float:
    assert callable(built.reward)
    reply = trajectory(turn([1], [2], reply=NEEDS_200_MIB), answer=NEEDS_200_MIB)
    return RewardResult.of(built.reward(reply, PROBLEM)).total


def test_a_configuration_sets_every_limit_of_its_sandbox(tmp_path: Path) -> None:
    limits = "{seconds: 2.5, memory_mib: 128, processes: 3, disk_mib: 4, files: 9, output_bytes: 100}"
    wanted = SandboxLimits(seconds=2.5, memory_mib=128, processes=3, disk_mib=4, files=9, output_bytes=100)
    assert built(tmp_path, f"sandbox: {{limits: {limits}}}\n").sandbox.limits == wanted


def test_the_defaults_of_the_configuration_are_those_of_the_sandbox(tmp_path: Path) -> None:
    assert built(tmp_path, "").sandbox.limits == SandboxLimits()


def test_tools_and_rewards_keep_the_limits_of_their_own_configuration(tmp_path: Path) -> None:
    """An evaluation variant is built after the training configuration and before training calls its tools."""
    path = tmp_path / "demo.yaml"
    variants = "evaluate: {variants: {small: ['sandbox.limits.memory_mib=128']}}\n"
    path.write_text(f"{CONFIG}{RUNS_CODE}{variants}sandbox: {{limits: {{memory_mib: 384}}}}\n")
    config = load_config(path)
    training, small = build_components(config), build_components(evaluations(config)["small"])
    assert [memory_of_the_tool(each) for each in (training, small, training)] == [384, 128, 384]
    assert [reward(each) for each in (training, small, training)] == [1.0, 0.0, 1.0]
