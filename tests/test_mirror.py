"""The copy of a run at an address: published by its manifest, brought back whole, on memory:// and a local S3."""

import json
import shutil
import threading
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import fsspec
import pytest
from command import TINY, succeed
from command import run as run_command

from condensegrpo.core.errors import ConfigError, RunError
from condensegrpo.storage import mirror
from condensegrpo.storage.mirror import Mirror, RemoteRun, check_mirror, fetch_run, mirrored
from condensegrpo.storage.run_folder import RunFolder
from condensegrpo.storage.trackers import read_metrics


@pytest.fixture
def address() -> Iterator[str]:
    yield "memory://runs"
    fsspec.filesystem("memory").rm("/runs", recursive=True)


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    made = RunFolder.create(tmp_path / "search")
    made.config.write_text("name: search\n")
    made.trajectories(1).write_text('{"id": "1/0/0"}\n')
    for local in ("lock", ".inspection.sqlite"):
        (made.path / local).touch()
    return made


def save(run: RunFolder, step: int, weights: str = "weights") -> Path:
    folder = run.checkpoints / f"step_{step:06d}"
    (folder / "model").mkdir(parents=True, exist_ok=True)
    (folder / "model" / "model.safetensors").write_text(weights)
    sizes = {"model/model.safetensors": len(weights)}
    (folder / "manifest.json").write_text(json.dumps({"step": step, "sizes": sizes}))
    (run.checkpoints / "latest").write_text(folder.name)
    return folder


def files(folder: Path) -> dict[str, str]:
    return {
        str(path.relative_to(folder)): path.read_text(errors="replace") for path in folder.rglob("*") if path.is_file()
    }


class Recorded:
    """A file system that records what is written and removed, and fails at the file that a test names."""

    def __init__(self, inner: Any) -> None:
        self.inner, self.calls, self.fails_at = inner, list[tuple[str, str]](), ""

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def put_file(self, source: str, target: str) -> None:
        if self.fails_at and target.endswith(self.fails_at):
            raise TimeoutError("the network is gone")
        self.calls.append(("put", target.removeprefix("/runs/search/")))
        self.inner.put_file(source, target)

    def rm_file(self, target: str) -> None:
        self.calls.append(("rm", target.removeprefix("/runs/search/")))
        self.inner.rm_file(target)


def recorded(address: str) -> RemoteRun:
    made = RemoteRun.at(address, "search")
    return RemoteRun(address=made.address, fs=Recorded(made.fs), root=made.root)


def test_a_manifest_is_the_last_file_of_its_checkpoint_and_the_first_that_is_removed(
    run: RunFolder, address: str
) -> None:
    remote = recorded(address)
    copy = Mirror(run, remote)
    save(run, 5)
    copy.copy()
    five, ten = "checkpoints/step_000005", "checkpoints/step_000010"
    weights, manifest = "model/model.safetensors", "manifest.json"
    assert remote.fs.calls == [
        ("put", "config.yaml"),
        ("put", "trajectories/step_000001.jsonl"),
        ("put", f"{five}/{weights}"),
        ("put", f"{five}/{manifest}"),
    ]
    save(run, 10)
    shutil.rmtree(run.checkpoints / "step_000005")
    run.trajectories(2).write_text("{}\n")
    remote.fs.calls.clear()
    copy.copy()
    assert remote.fs.calls == [
        ("put", "trajectories/step_000002.jsonl"),
        ("put", f"{ten}/{weights}"),
        ("put", f"{ten}/{manifest}"),
        ("rm", f"{five}/{manifest}"),
        ("rm", f"{five}/{weights}"),
    ]
    remote.fs.calls.clear()
    copy.copy()
    assert remote.fs.calls == []


def test_a_copy_that_breaks_off_leaves_the_checkpoint_before_and_goes_on_where_it_was(
    run: RunFolder, address: str, tmp_path: Path
) -> None:
    remote = recorded(address)
    copy = Mirror(run, remote)
    save(run, 5, "old")
    copy.copy()
    save(run, 10, "new")
    remote.fs.fails_at = "step_000010/manifest.json"
    with pytest.raises(RunError, match=r"memory://runs/search: TimeoutError: the network is gone.*\(mirror\)"):
        copy.copy()
    assert remote.newest() == 5
    remote.fetch(tmp_path / "back")
    assert [path.name for path in (tmp_path / "back" / "checkpoints").iterdir()] == ["step_000005"]
    remote.fs.fails_at = ""
    remote.fs.calls.clear()
    copy.copy()
    assert remote.fs.calls == [("put", "checkpoints/step_000010/manifest.json")]
    assert remote.newest() == 10


def test_a_checkpoint_that_is_replaced_counts_again_when_it_is_whole(run: RunFolder, address: str) -> None:
    remote = recorded(address)
    copy = Mirror(run, remote)
    save(run, 5, "old")
    copy.copy()
    save(run, 5, "newer")
    remote.fs.fails_at = "model.safetensors"
    with pytest.raises(RunError):
        copy.copy()
    assert remote.newest() is None
    remote.fs.fails_at = ""
    copy.copy()
    assert remote.newest() == 5


def test_a_checkpoint_that_is_replaced_while_it_is_copied_is_no_mixture(run: RunFolder, address: str) -> None:
    class SavedMeanwhile(Recorded):
        """The run saves step 5 again while its weights are copied."""

        def put_file(self, source: str, target: str) -> None:
            super().put_file(source, target)
            if target.endswith("model.safetensors") and Path(source).read_text() == "old":
                save(run, 5, "new")

    remote = recorded(address)
    remote = RemoteRun(address=remote.address, fs=SavedMeanwhile(remote.fs.inner), root=remote.root)
    save(run, 5, "old")
    copy = Mirror(run, remote)
    copy.copy()
    assert remote.newest() is None
    copy.copy()
    assert remote.newest() == 5
    assert remote.fs.cat_file("/runs/search/checkpoints/step_000005/model/model.safetensors") == b"new"


def test_a_checkpoint_that_an_earlier_process_copied_stays_there(run: RunFolder, address: str, tmp_path: Path) -> None:
    """A machine that is lost soon after it began would otherwise leave no whole checkpoint: the run were lost."""
    save(run, 5)
    Mirror(run, recorded(address)).copy()
    remote = recorded(address)
    remote.fetch(tmp_path / "back")
    copy = Mirror(RunFolder(tmp_path / "back"), remote)
    copy.copy()
    assert [call for call in remote.fs.calls if "checkpoints" in call[1]] == []
    assert remote.newest() == 5
    save(RunFolder(tmp_path / "back"), 5, "other weights")
    copy.copy()
    assert remote.fs.cat_file("/runs/search/checkpoints/step_000005/model/model.safetensors") == b"other weights"


def test_a_run_comes_back_with_its_newest_checkpoint_alone(run: RunFolder, address: str, tmp_path: Path) -> None:
    save(run, 5)
    save(run, 10)
    remote = RemoteRun.at(address, "search")
    with mirrored(run, remote):
        run.metrics.write_text('{"step": 10}\n')
    expected = {name: text for name, text in files(run.path).items() if "step_000005" not in name}
    back = RunFolder(tmp_path / "back")
    assert fetch_run(back, remote, downloads=True, seconds=0)
    local = (".inspection.sqlite", "lock", "checkpoints/latest")
    assert files(back.path) == {name: text for name, text in expected.items() if name not in local}
    Mirror(back, remote).copy()
    assert remote.newest() == 10


def test_a_run_without_a_checkpoint_comes_back_with_its_warm_start_once_that_is_whole(
    run: RunFolder, address: str, tmp_path: Path
) -> None:
    """A machine that was lost before the first checkpoint had copied the warm start, and the next one removed it."""
    warm, unfinished, remote = run.path / "origin/warm", run.path / "origin/.warm-checkpoints", recorded(address)
    warm.mkdir(parents=True)
    unfinished.mkdir()
    for file in (warm / "config.json", warm / "model.safetensors", unfinished / "latest"):
        file.write_text("{}")
    remote.fs.fails_at = "config.json"
    with pytest.raises(RunError, match="copying"):
        Mirror(run, remote).copy()
    assert "origin/warm/model.safetensors" in [path for _, path in remote.fs.calls]
    back = RunFolder(tmp_path / "back")
    assert not fetch_run(back, remote, downloads=True, seconds=0)
    remote.fs.fails_at = ""
    Mirror(run, remote).copy()
    assert fetch_run(back, remote, downloads=True, seconds=0)
    assert {name for name in files(back.path) if name.startswith("origin/")} == {
        "origin/warm/config.json",
        "origin/warm/model.safetensors",
    }


def test_a_run_that_comes_back_replaces_nothing_but_a_run(run: RunFolder, address: str, tmp_path: Path) -> None:
    save(run, 5)
    remote = RemoteRun.at(address, "search")
    Mirror(run, remote).copy()
    other = RunFolder(tmp_path / "other" / "search")
    other.path.mkdir(parents=True)
    (other.path / "notes.txt").write_text("mine")
    with pytest.raises(RunError, match=r"search: the folder is not empty, and it holds no config\.yaml"):
        fetch_run(other, remote, downloads=True, seconds=0)
    assert files(other.path) == {"notes.txt": "mine"}


def test_another_rank_waits_until_the_first_has_downloaded(run: RunFolder, address: str, tmp_path: Path) -> None:
    remote, back = RemoteRun.at(address, "search"), RunFolder(tmp_path / "back")
    assert not fetch_run(back, remote, downloads=False, seconds=0)
    save(run, 5)
    Mirror(run, remote).copy()
    with pytest.raises(RunError, match="the first rank did not download it"):
        fetch_run(back, remote, downloads=False, seconds=0)
    first = threading.Thread(target=lambda: fetch_run(back, remote, downloads=True, seconds=0))
    first.start()
    assert fetch_run(back, remote, downloads=False, seconds=60)
    first.join()


def test_checkpoints_beyond_latest_were_abandoned_and_are_no_part_of_the_copy(run: RunFolder, address: str) -> None:
    save(run, 30)
    copy = Mirror(run, RemoteRun.at(address, "search"))
    copy.copy()
    save(run, 12)
    copy.copy()
    assert RemoteRun.at(address, "search").newest() == 12


def test_nothing_is_copied_before_something_was_learned(tmp_path: Path, address: str) -> None:
    fsspec.filesystem("memory").makedirs("/runs")
    run = RunFolder.create(tmp_path / "new")
    run.config.write_text("name: new\n")
    remote = RemoteRun.at(address, "new")
    with mirrored(run, remote):
        pass
    assert remote.files() == {}


def test_the_thread_copies_while_the_run_goes_on_and_repeats_what_failed(
    run: RunFolder, address: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(mirror, "COPY_SECONDS", 0.01)
    save(run, 5)
    remote, tried = recorded(address), threading.Event()
    remote.fs.fails_at = "config.yaml"
    monkeypatch.setattr(caplog.handler, "emit", lambda record: tried.set())  # later tests have the same handler
    with mirrored(run, remote):
        assert tried.wait(60)
        remote.fs.fails_at = ""
        while remote.newest() is None:
            time.sleep(0.02)
    remote.fs.fails_at = "step_000002.jsonl"
    run.trajectories(2).write_text("{}\n")
    with pytest.raises(RunError, match="the network is gone"), mirrored(run, remote):
        pass
    with pytest.raises(KeyError, match="first"), mirrored(run, remote):
        raise KeyError("first")  # comes before the error of the copy


def test_the_copy_goes_on_while_checkpoints_are_published_and_pruned(run: RunFolder, address: str) -> None:
    copy, ended = Mirror(run, RemoteRun.at(address, "search")), threading.Event()
    written, renamed = (run.checkpoints / f"step_000010.tmp-{number}" for number in (1, 2))
    written.mkdir()

    def rename_repeatedly() -> None:
        while not ended.is_set():
            written.rename(renamed)
            renamed.rename(written)

    thread = threading.Thread(target=rename_repeatedly)
    thread.start()
    try:
        for _ in range(300):
            copy.copy()
    finally:
        ended.set()
        thread.join()
    assert RemoteRun.at(address, "search").files().keys() == {"config.yaml", "trajectories/step_000001.jsonl"}


def test_what_is_there_is_not_replaced_by_another_or_an_older_run(run: RunFolder, address: str) -> None:
    remote = RemoteRun.at(address, "search")
    save(run, 5)
    Mirror(run, remote).copy()
    check_mirror(run, remote, continued=True, overwrite=False)
    shutil.rmtree(run.checkpoints)
    with pytest.raises(RunError, match="holds a run"):
        check_mirror(run, remote, continued=False, overwrite=False)
    with pytest.raises(RunError, match=r"a checkpoint of step 5, which .*search has not"):
        check_mirror(run, remote, continued=True, overwrite=False)
    check_mirror(run, remote, continued=False, overwrite=True)


def test_a_checkpoint_that_lacks_a_file_of_its_manifest_is_an_error(run: RunFolder, address: str) -> None:
    remote = RemoteRun.at(address, "search")
    save(run, 5)
    Mirror(run, remote).copy()
    remote.fs.rm_file(f"{remote.root}/checkpoints/step_000005/model/model.safetensors")
    with pytest.raises(RunError, match=r"step_000005: model/model.safetensors is missing"):
        remote.newest()


def test_a_run_goes_on_from_its_copy_where_its_folder_is_gone(tmp_path: Path) -> None:
    runs, store = tmp_path / "runs", tmp_path / "store"
    line = ("train", *TINY, "warm_start.steps=2", f"runs_dir={runs}", "name=one", f"mirror=file://{store}")
    succeed(*line, "train.steps=2")
    assert RemoteRun.at(f"file://{store}", "one").newest() == 2
    shutil.rmtree(runs)
    assert "mirror: " in run_command(*line, "train.steps=3").stderr  # another run would replace it
    done = succeed(*line, "train.steps=3", "--continue")
    assert "resumed after step 2" in done
    assert [line["step"] for line in read_metrics(runs / "one" / "metrics.jsonl") if "rows" in line] == [1, 2, 3]
    assert RemoteRun.at(f"file://{store}", "one").newest() == 3
    assert files(store / "one").keys() | {"lock", "checkpoints/latest"} == files(runs / "one").keys()
    shutil.rmtree(runs)
    shutil.rmtree(store / "one/checkpoints")  # as of a machine that was lost before the first one
    done = succeed(*line, "train.steps=1", "--continue")
    assert "warm start" not in done
    assert [line["step"] for line in read_metrics(runs / "one" / "metrics.jsonl") if "rows" in line] == [1]


@pytest.mark.parametrize("wrong", ["nosuch://bucket", "gs://bucket/runs"])
def test_an_address_without_a_file_system_names_the_key(wrong: str) -> None:
    if wrong.startswith("gs") and find_spec("gcsfs"):
        pytest.skip("gcsfs is installed: the address has a file system")
    with pytest.raises(ConfigError, match=f"mirror={wrong}"):
        RemoteRun.at(wrong, "run")


@pytest.mark.skipif(
    find_spec("s3fs") is None or find_spec("moto") is None, reason="s3fs or moto is not installed: make cluster"
)
@pytest.mark.filterwarnings("ignore")
def test_a_bucket_of_s3(run: RunFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0)
    server.start()
    host, port = server.get_host_and_port()
    for name, value in {"ACCESS_KEY_ID": "test", "SECRET_ACCESS_KEY": "test", "DEFAULT_REGION": "us-east-1"}.items():
        monkeypatch.setenv(f"AWS_{name}", value)
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://{host}:{port}")
    try:
        fsspec.filesystem("s3").mkdir("bucket")
        remote = RemoteRun.at("s3://bucket/runs", "search")
        assert remote.newest() is None
        save(run, 5)
        copy = Mirror(run, remote)
        copy.copy()
        save(run, 10, "more weights")
        shutil.rmtree(run.checkpoints / "step_000005")
        copy.copy()
        assert remote.newest() == 10
        assert not [name for name in remote.files() if "step_000005" in name]
        remote.fetch(tmp_path / "back")
        assert files(tmp_path / "back" / "checkpoints") == {
            name: text for name, text in files(run.checkpoints).items() if name != "latest"
        }
    finally:
        server.stop()
