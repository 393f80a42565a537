"""``environment.json`` holds what a run was made with."""

import json
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

from condensegrpo.core.errors import DataError, RunError
from condensegrpo.storage.environment import edited_inputs, write_environment

WRITE = (
    "import sys; from pathlib import Path; from condensegrpo.storage.environment import write_environment; "
    "write_environment(Path(sys.argv[1])); print('torch' in sys.modules)"
)


def written(folder: Path, *arguments: str, cwd: Path) -> tuple[dict[str, object], str]:
    """The file that a process of its own writes, and what the process prints."""
    command = [sys.executable, "-c", WRITE, str(folder), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=cwd)
    return json.loads((folder / "environment.json").read_text()), done.stdout.strip()


def test_versions_command_and_hardware_are_written_without_importing_torch(tmp_path: Path) -> None:
    found, imported = written(tmp_path, "run one", "url=http://ana:secret@host/", cwd=tmp_path)
    assert imported == "False"
    assert found["command"] == f"-c {tmp_path} 'run one' url=http://***@host/"
    packages = found["packages"]
    assert isinstance(packages, dict)
    assert packages["torch"] == metadata.version("torch")
    assert found["python"] == sys.version.split()[0]
    assert isinstance(found["cpus"], int)
    assert isinstance(found["memory_bytes"], int)
    assert found["memory_bytes"] > 2**20
    assert isinstance(found["gpus"], list)
    log = write_environment(tmp_path).splitlines()
    assert [line.partition(":")[0] for line in log] == ["command", "versions", "git revision", "hardware"]
    assert f"torch {metadata.version('torch')}" in log[1]
    assert f"{found['cpus']} CPUs" in log[3]


def test_the_git_revision_is_that_of_the_working_directory(tmp_path: Path) -> None:
    assert written(tmp_path, cwd=tmp_path)[0]["git_revision"] is None

    def git(*arguments: str) -> str:
        identity = ("-c", "user.name=a", "-c", "user.email=a@example.org")
        done = subprocess.run(["git", *identity, *arguments], cwd=tmp_path, capture_output=True, text=True, check=True)
        return done.stdout.strip()

    git("init", "-q")
    (tmp_path / "file").write_text("1")
    git("add", "file")
    git("commit", "-qm", "one")
    found, _ = written(tmp_path, cwd=tmp_path)
    assert (found["git_revision"], found["git_modified"]) == (git("rev-parse", "HEAD"), False)
    (tmp_path / "file").write_text("2")
    assert written(tmp_path, cwd=tmp_path)[0]["git_modified"] is True


def test_an_edited_plug_in_of_a_run_is_named(tmp_path: Path) -> None:
    plugin, run = tmp_path / "brief.py", tmp_path / "run"
    plugin.write_text("class Brief: ...\n")
    run.mkdir()
    assert edited_inputs(run) == ()
    write_environment(run, plugins=(plugin,))
    assert edited_inputs(run) == ()
    plugin.write_text("class Brief: words = 3\n")
    assert edited_inputs(run) == (str(plugin),)
    write_environment(run, plugins=(plugin,))  # resumed: half of it was made with what the file was
    assert edited_inputs(run) == (str(plugin),)
    plugin.unlink()  # as where the run was moved to another machine
    assert edited_inputs(run) == ()


def test_a_writer_whose_folder_changed_is_named_whatever_folder_its_name_stands_for(tmp_path: Path) -> None:
    first, second = tmp_path / "step_000001", tmp_path / "step_000002"  # of a run that goes on
    for number, folder in enumerate((first, second)):
        folder.mkdir()
        (folder / "config.json").write_text("{}")
        (folder / "model.safetensors").write_bytes(bytes(8 + number))
    assert edited_inputs(tmp_path, {"runs/other": first}.get) == ()
    write_environment(tmp_path, writers={"runs/other": first})
    assert edited_inputs(tmp_path, {"runs/other": first}.get) == ()
    write_environment(tmp_path, writers={"runs/other": second})
    assert edited_inputs(tmp_path, {"runs/other": second}.get) == ("runs/other",)
    (first / "model.safetensors").write_bytes(b"other")
    assert edited_inputs(tmp_path, {"runs/other": first}.get) == ("runs/other",)


@pytest.mark.parametrize("content", ["[]", '{"folder": "', "\0"])
def test_a_damaged_file_is_named(tmp_path: Path, content: str) -> None:
    (tmp_path / "environment.json").write_text(content)
    for reader in (edited_inputs, write_environment):
        with pytest.raises(DataError, match=r"environment\.json: it is damaged .*Remove it: the next start writes it"):
            reader(tmp_path)


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"writing .*nowhere.*environment\.json: No such file"):
        write_environment(tmp_path / "nowhere")
