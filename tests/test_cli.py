"""The command line as a user meets it: help, dry run, and errors that say what to do."""

import json
import os
import pty
import shlex
import subprocess
import sys
import time
from functools import partial
from importlib.metadata import version
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
from command import ENVIRONMENT, ROOT, TINY, at_terminal, command, on_a_full_disk, run, succeed
from forked import ForkedCommand
from typer.testing import CliRunner

from condensegrpo.cli.app import COMMANDS, app
from condensegrpo.config.load import dump_with_origins, find_config, load_config

HEAVY = {"transformers", "deepspeed", "datasets", "peft", "accelerate", "matplotlib", "sentencepiece", "wandb", "vllm"}


def refused(*arguments: str, code: int = 2) -> str:
    """The one error message of a command that must fail."""
    done = run(*arguments)
    assert done.returncode == code, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    return done.stderr


def test_the_help_of_every_command_fits_80_columns_with_whole_paragraphs() -> None:
    shown = CliRunner(env={"COLUMNS": "80"})
    for name in (*COMMANDS, "runs compare", "launch slurm", "launch sagemaker", "model fetch"):
        lines = shown.invoke(app, [*name.split(), "--help"]).output.splitlines()
        assert all(len(line) <= 80 for line in lines), name
        assert not any(bracket in lines[1] for bracket in ("[[", "...]", "]]")), lines[1]
    listed = shown.invoke(app, ["--help"]).output
    assert all(f" {name} " in listed for name in COMMANDS if name != "inspect-trajectory")
    assert "inspect-trajectory." in listed  # by the command that it stands for
    paragraph = shown.invoke(app, ["inspect", "--help"]).output.partition("Where there is no terminal")[2].splitlines()
    assert paragraph[1].strip() == "--svg: print a step, then one trajectory."


def test_the_version_and_a_traceback_can_be_asked_of_every_command() -> None:
    assert succeed("--version") == f"condensegrpo {version('condensegrpo')}\n"
    done = run("plan", "quikstart", "--debug")
    assert "Traceback" in done.stderr
    assert done.stderr.splitlines()[-1].startswith("error: ")
    assert "Traceback" not in run("plan", "quikstart").stderr


def test_control_sequences_in_an_error_do_not_reach_the_terminal() -> None:
    for arguments in (("inspect", "\x1b]52;c;aGk=\x07"), ("inspect", "\x1b]52;c;aGk=\x07", "--debug")):
        done = run(*arguments)
        assert done.returncode == 1
        assert "␛]52;c;aGk=␇" in done.stderr
        assert not {"\x1b", "\x07"} & set(done.stderr)


def test_values_with_credentials_are_shown_as_stars(tmp_path: Path) -> None:
    url = "http://ana:hunt@er2@host/v1"
    said = (
        refused("train", "quickstart", f"train.steps={url}")
        + refused("train", "quickstart", f"sampler.name={{url: '{url}'}}")
        + refused("train", "quickstart", "train.steps=http://ana:hunt#1?er2@host/v1")
        + refused("train", "quickstart", "algorithm.api_key=[hunt")
        + refused(
            "train",
            "quickstart",
            f"runs_dir={tmp_path}",  # a run of this name would be refused first
            f"trackers=[{{name: mlflow, options: {{tracking_uri: '{url}'}}}}]",
        )
    )
    assert "er2" not in said
    assert "hunt" not in said
    assert "found 'http://***@host/v1'" in said
    config = load_config(find_config("quickstart"), [f"sampler.options={{url: '{url}', api_key: hunter2}}"])
    shown = dump_with_origins(config, find_config("quickstart"))
    assert "http://***@host/v1" in shown
    assert "hunt" not in shown


def test_the_shell_completes_configurations_and_runs(tmp_path: Path) -> None:
    (tmp_path / "runs/study/arm-seed0").mkdir(parents=True)
    (tmp_path / "runs/study/arm-seed0/config.yaml").touch()
    assert completed("train quick", tmp_path) == ["quickstart", "quickstart_full", "quickstart_outcome"]
    assert completed("runs compare runs/", tmp_path) == ["runs/study/arm-seed0"]
    assert "--overwrite" in completed("train --over", tmp_path)


def completed(line: str, cwd: Path) -> list[str]:
    """What bash would offer at the end of a line."""
    words = ["condensegrpo", *line.split(" ")]
    variables = {
        "_CONDENSEGRPO_COMPLETE": "complete_bash", "COMP_WORDS": " ".join(words), "COMP_CWORD": str(len(words) - 1)
    }  # fmt: skip
    process = ForkedCommand((), cwd=cwd, environment=ENVIRONMENT, more=variables)
    return process.communicate(timeout=240)[0].split()


@pytest.mark.parametrize(
    ("arguments", "loaded", "not_loaded"),
    [
        (("--help",), "typer", {"torch", "numpy", "yaml", *HEAVY}),
        (("plugins",), "rich", {"torch", "numpy", "yaml", *HEAVY}),
        (("train", "configs/quickstart.yaml", "--dry-run"), "torch", {"aiohttp", *HEAVY}),
    ],
)
def test_a_command_imports_only_what_it_needs(arguments: tuple[str, ...], loaded: str, not_loaded: set[str]) -> None:
    """What keeps these commands fast: ``time condensegrpo --help`` gives the seconds."""
    done = subprocess.run(
        command(*arguments, launcher=("-X", "importtime", "-m")),
        capture_output=True, text=True, cwd=ROOT, env=ENVIRONMENT, timeout=240, check=True,
    )  # fmt: skip
    modules = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert loaded in modules
    assert modules.isdisjoint(not_loaded)


def test_plugins_lists_what_is_installed() -> None:
    out = succeed("plugins")
    for name in ("last_k", "ledger", "gsm8k", "inverse_max_context", "calculator", "transformers"):
        assert name in out


def test_plug_ins_of_another_package_are_imported_and_one_that_fails_is_reported(tmp_path: Path) -> None:
    (tmp_path / "other.py").write_text('from abc import ABC\n\n\nclass Good(ABC):\n    """Pays for brevity."""\n')
    (tmp_path / "broken.py").write_text('import not_installed_anywhere\n\n\nclass Bad:\n    """Pays."""\n')
    (tmp_path / "other-1.2.dist-info").mkdir()
    (tmp_path / "other-1.2.dist-info/METADATA").write_text("Metadata-Version: 2.1\nName: other\nVersion: 1.2\n")
    (tmp_path / "other-1.2.dist-info/entry_points.txt").write_text(
        "[condensegrpo.rewards]\nbrevity = other:Good\nlost = broken:Bad\n"
    )
    done = subprocess.run(
        command("plugins", "rewards", "--json"),
        capture_output=True, text=True, cwd=ROOT, env={**ENVIRONMENT, "PYTHONPATH": str(tmp_path)}, timeout=240,
        check=False,
    )  # fmt: skip
    assert done.returncode == 1
    listed = {plugin["name"]: plugin for plugin in json.loads(done.stdout)["plugins"]}
    assert listed["brevity"]["summary"] == "Pays for brevity."
    assert listed["brevity"]["distribution"] == "other 1.2"
    assert "not_installed_anywhere" in listed["lost"]["error"]
    assert not any(plugin["error"] for name, plugin in listed.items() if name != "lost")


def test_a_dry_run_prints_the_resolved_configuration_and_makes_nothing(tmp_path: Path) -> None:
    began = time.monotonic()
    out = succeed("train", *TINY, f"runs_dir={tmp_path}", "--dry-run")
    assert "problems_per_step: 4" in out
    assert "mode: trajectory_constant" in out  # a default, resolved
    assert list(tmp_path.iterdir()) == []
    assert time.monotonic() - began < 60


def test_train_without_a_configuration_says_what_it_wants() -> None:
    assert "wanted one CONFIG" in refused("train", "train.steps=3")


def test_a_configuration_whose_path_holds_an_equals_sign_is_no_override(tmp_path: Path) -> None:
    file = tmp_path / "lr=3" / "config.yaml"
    file.parent.mkdir()
    file.write_text("extends: quickstart\n")
    assert "steps: 7" in succeed("train", str(file), "train.steps=7", f"runs_dir={tmp_path}", "--dry-run")
    assert "train.stps: unknown key" in refused("eval", "some/model", str(file.parent), "train.stps=7")


def test_resuming_what_is_no_run_says_so(tmp_path: Path) -> None:
    assert "no config.yaml" in refused("train", "--resume", str(tmp_path), code=1)


def test_evaluating_a_model_needs_to_know_the_task(tmp_path: Path) -> None:
    assert "a CONFIG must say the task" in refused("eval", str(tmp_path))


def test_variants_which_eval_does_not_play_need_no_data(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(
        "model: {path: no/such-model}\n"
        "task: {name: ledger}\n"
        "evaluate: {variants: {other: ['task={name: jsonl, data: gone.jsonl}']}}\n"
    )
    shown = run("eval", "no/such-model", str(file)).stderr
    assert "no/such-model" in shown
    assert "gone.jsonl" not in shown


def test_evaluating_a_checkpoint_that_is_gone_names_those_that_are_kept(tmp_path: Path) -> None:
    (tmp_path / "checkpoints" / "step_000004").mkdir(parents=True)
    text = refused("eval", str(tmp_path / "checkpoints" / "step_000003"), code=1)
    assert "The run keeps step_000004" in text


def test_a_budget_below_the_question_stops_the_run_before_the_warm_start(tmp_path: Path) -> None:
    message = refused("train", *TINY, "rollout.limits.max_context_tokens=8", f"runs_dir={tmp_path}")
    assert "rollout.limits.max_context_tokens" in message
    assert not (tmp_path / "quickstart/origin/warm").exists()


def test_a_refused_run_leaves_no_folder(tmp_path: Path) -> None:
    refused("train", *TINY, "condenser.options.keep_lst=3", f"runs_dir={tmp_path}")
    assert list(tmp_path.iterdir()) == []


def test_paths_that_look_like_markup_do_no_harm(tmp_path: Path) -> None:
    short = ("train.steps=0", "warm_start.steps=0", "evaluate.problems=1")
    out = succeed("train", *TINY, *short, f"runs_dir={tmp_path}/[/x]")
    assert "[/x]" in out


def test_a_full_disk_ends_the_run_with_what_to_do_and_the_run_goes_on_when_there_is_room(tmp_path: Path) -> None:
    short = ("warm_start.steps=1", "train.steps=1", "train.save_every=1", "evaluate.problems=1")
    done = run("train", *TINY, *short, f"runs_dir={tmp_path}", program=partial(on_a_full_disk, 700_000))
    assert done.returncode == 1, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    assert "The disk or quota is full: free some space" in done.stderr
    assert not list((tmp_path / "quickstart/checkpoints").iterdir())  # no half of one
    assert "largest context" in succeed("train", "--resume", str(tmp_path / "quickstart"))


def test_a_run_outlives_its_terminal(tmp_path: Path) -> None:
    """Its shell has ended, or a connection; the signal that tells of it was ignored, as ``disown`` has it."""
    terminal, end = pty.openpty()
    with Connection(end) as other_end:
        short = ("warm_start.steps=1", "train.steps=1", "evaluate.problems=1")
        arguments = ("train", *TINY, *short, f"runs_dir={tmp_path}")
        program = partial(at_terminal, other_end)
        process = ForkedCommand(arguments, cwd=ROOT, environment=ENVIRONMENT, more={"TERM": "xterm"}, program=program)
    log = tmp_path / "quickstart/log.txt"
    while not log.exists():
        os.read(terminal, 4096)
    os.close(terminal)
    assert process.wait(timeout=240) == 0, log.read_text()
    assert "stdout takes nothing more: Input/output error\n" in log.read_text()
    assert (tmp_path / "quickstart/report.html").exists()


def test_an_output_that_cannot_be_written_is_one_line() -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(command("plugins"), stdout=full, stderr=subprocess.PIPE, text=True, env=ENVIRONMENT)
    assert (done.returncode, done.stderr) == (
        1,
        "error: writing to the standard output: No space left on device. Send it elsewhere.\n",
    )


def test_a_closed_stream_is_no_error() -> None:
    for closed in ("2>&-", ">&- 2>&-"):
        line = f"{shlex.join(command('plugins'))} {closed}"
        done = subprocess.run(line, shell=True, capture_output=True, text=True, env=ENVIRONMENT)
        assert (done.returncode, done.stderr) == (0, "")
        assert ("last_k" in done.stdout) is (closed == "2>&-")


def test_a_stream_without_some_letters_gets_question_marks() -> None:
    program = """
import sys
from condensegrpo.cli.app import main
sys.argv = ["condensegrpo", "--version"]
try:
    main()
finally:
    print("step → 1")
"""
    environment = {**ENVIRONMENT, "PYTHONIOENCODING": "ascii"}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, env=environment, check=True)
    assert done.stdout.endswith(b"step ? 1\n")
