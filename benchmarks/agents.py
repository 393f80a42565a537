"""Whether coding agents that people run work unmodified as the task ``agent``: ten turns with a scripted policy.

    python benchmarks/agents.py                    # Claude Code, Codex and opencode; a minute, 1 GB of packages
    python benchmarks/agents.py codex --keep here  # one of them, its packages and its folder kept in ``here``

Each is an npm package, installed into a temporary folder. It is asked to append nine lines to a file by its shell, one
a turn. The policy writes the calls of whatever shell it is shown, then says that it is done. Printed is what the
trajectory has: turns, training rows, and whatever the agent rewrote. A request without a shell, such as one for the
title of a conversation, is answered by a word; it is a turn of the trajectory like any other.
"""

import argparse
import asyncio
import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from condensegrpo.algorithms.segments import segments
from condensegrpo.condensers.whole_units import Full
from condensegrpo.core.trajectory import Trajectory
from condensegrpo.episodes.engine import Engine
from condensegrpo.episodes.episode import run_episode
from condensegrpo.episodes.render import Renderer
from condensegrpo.episodes.settings import CondenseSettings, Limits, ToolLimits
from condensegrpo.episodes.toolcalls import Toolbox
from condensegrpo.episodes.toolformats import Tagged
from condensegrpo.samplers.scripted import ScriptedSampler
from condensegrpo.tasks.agent import Agent

LINES = 9
QUESTION = f"Append the numbers 1 to {LINES} to the file count.txt in this folder, one by one, with your shell tool."
SHELLS = {"Bash": "command", "bash": "command", "exec_command": "cmd", "shell_command": "command"}  # argument by tool
CHATML = (
    "{%- for message in messages -%}{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}"
    "{%- endfor -%}{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\n' }}{%- endif -%}"
)


@dataclass(frozen=True, slots=True)
class Program:
    """An agent: its package, the command that answers a question, and a file of settings in its folder."""

    package: str
    command: str
    settings: tuple[str, str] | None = None


PROGRAMS = {
    "claude-code": Program(
        "@anthropic-ai/claude-code",
        'DISABLE_TELEMETRY=1 DISABLE_AUTOUPDATER=1 exec claude -p "$0" --model policy --allowedTools Bash',
    ),
    "codex": Program(
        "@openai/codex",
        "exec codex exec --skip-git-repo-check --dangerously-bypass-approvals-and-sandbox --model policy "
        '-c model_provider=here -c "model_providers.here={name=\\"here\\", base_url=\\"$OPENAI_BASE_URL\\", '
        'env_key=\\"OPENAI_API_KEY\\", wire_api=\\"responses\\"}" "$0" < /dev/null',
    ),
    "opencode": Program(
        "opencode-ai",
        'exec opencode run --model here/policy "$0"',
        settings=(
            "opencode.json",
            json.dumps(
                {
                    "permission": "allow",
                    "provider": {
                        "here": {
                            "npm": "@ai-sdk/openai-compatible",
                            "options": {"baseURL": "{env:OPENAI_BASE_URL}", "apiKey": "{env:OPENAI_API_KEY}"},
                            "models": {"policy": {"tool_call": True}},
                        }
                    },
                }
            ),
        ),
    ),
}


def tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer in which every byte is a token."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    bytes_only = Tokenizer(models.BPE({letter: number for number, letter in enumerate(alphabet)}, []))
    bytes_only.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bytes_only.decoder = decoders.ByteLevel()
    bytes_only.add_special_tokens([AddedToken(text, special=True) for text in ("<|im_start|>", "<|im_end|>")])
    return PreTrainedTokenizerFast(tokenizer_object=bytes_only, eos_token="<|im_end|>", chat_template=CHATML)


def policy(prompt: str) -> str:
    """A call for the line after the newest one, or the end."""
    if (shell := next((name for name in SHELLS if f'"name": "{name}"' in prompt), None)) is None:
        return "counting"
    written = [int(number) for number in re.findall(r"line (\d) is written", prompt)]
    number = max(written, default=0) + 1
    if number > LINES:
        return "It is done."
    command = f"echo {number} >> count.txt; echo line {number} 'is written'"
    arguments = {SHELLS[shell]: command} | ({"description": "Appends a line"} if shell in ("Bash", "bash") else {})
    return f"I write line {number}. <tool>{json.dumps({'name': shell, 'args': arguments})}</tool>"


def scripted(reply: Callable[[str], str]) -> ScriptedSampler:
    """A sampler that says what a function of the prompt returns."""
    words = tokenizer()
    end = words.convert_tokens_to_ids("<|im_end|>")
    return ScriptedSampler(lambda ids: [*words.encode(reply(words.decode(list(ids))), add_special_tokens=False), end])


async def played(name: str, installed: Path, data: Path) -> Trajectory:
    """The episode of a program."""
    program = PROGRAMS[name]
    folder = installed / "project"
    folder.mkdir(exist_ok=True)
    if program.settings is not None:
        (folder / program.settings[0]).write_text(program.settings[1], encoding="utf-8")
    path = f"PATH={installed / 'node_modules' / '.bin'}:$PATH"
    task = Agent(
        program=("sh", "-c", f"{path}; export PATH; {program.command}", "{question}"),
        data=str(data),
        answer=None,
        folder=str(folder),
        outcome=("sh", "-c", f'test "$(cat count.txt)" = "$(seq {LINES})"'),
        limits={"seconds": 240, "memory_mib": 1 << 17, "processes": 4096, "disk_mib": 4096},  # type: ignore[arg-type]  # made by pydantic
        tool_format="tagged",
    )
    engine = Engine(
        sampler=scripted(policy),
        renderer=Renderer(tokenizer()),
        condenser=Full(),
        condenser_name="full",
        condense=CondenseSettings(when="over_budget"),
        toolbox=Toolbox({}, format=Tagged(), limits=ToolLimits()),
        limits=Limits(max_turns=40, max_context_tokens=1 << 20, max_output_tokens=2000, turn_seconds=240.0),
    )
    problem = (*task.problems("train"), *task.problems("eval"))[0]
    return await run_episode(
        problem, environment=task.environment, engine=engine, group_id="0", sample=0, seed=lambda number: number
    )


def install(name: str, folder: Path) -> str:
    """Install a program and return its version."""
    folder.mkdir(parents=True, exist_ok=True)
    package = PROGRAMS[name].package
    subprocess.run(["npm", "install", "--no-fund", "--no-audit", "--silent", package], cwd=folder, check=True)
    manifest = folder / "node_modules" / package / "package.json"
    return str(json.loads(manifest.read_text(encoding="utf-8"))["version"])


def report(name: str, version: str, trajectory: Trajectory, seconds: float) -> bool:
    """Print what came of a program; whether all of it is as wanted."""
    rewrites = [(number, turn.condensation) for number, turn in enumerate(trajectory.turns) if turn.condensation]
    ones = [1.0] * len(trajectory.turns)
    rows = segments(trajectory, advantage_K=ones, weight_K=ones)
    shelled = [turn for turn in trajectory.turns if turn.tool_attempts]
    print(
        f"{name} {version}: {trajectory.stop}, outcome {trajectory.outcome}, {len(trajectory.turns)} turns of which "
        f"{len(shelled)} call the shell, {len(rows)} rows, {len(rewrites)} rewrites, {seconds:.0f} s"
    )
    for number, condensation in rewrites:
        print(f"  before turn {number}: {condensation.reason if condensation else ''}")
    if trajectory.detail:
        print(f"  {trajectory.detail}")
    return trajectory.outcome == 1.0


def main(arguments: Sequence[str] | None = None) -> int:
    """Try programs."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument(
        "programs", nargs="*", choices=[*PROGRAMS, []], metavar="NAME", help=f"{', '.join(PROGRAMS)}; all by default"
    )
    parser.add_argument("--keep", type=Path, help="folder for packages that stays")
    given = parser.parse_args(arguments)
    works = True
    with tempfile.TemporaryDirectory() as temporary:
        place = given.keep or Path(temporary)
        data = Path(temporary, "rows.jsonl")
        rows = (json.dumps({"question": f"{QUESTION} ({number})"}) for number in range(40))
        data.write_text("\n".join(rows), encoding="utf-8")
        for name in given.programs or PROGRAMS:
            print(f"installing {PROGRAMS[name].package}", file=sys.stderr)
            version, began = install(name, place / name), time.monotonic()
            trajectory = asyncio.run(played(name, place / name, data))
            works = report(name, version, trajectory, time.monotonic() - began) and works
    return 0 if works else 1


if __name__ == "__main__":
    sys.exit(main())
