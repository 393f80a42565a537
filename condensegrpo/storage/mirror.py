"""A copy of a run's folder on any file system that fsspec knows, such as ``s3://bucket/runs``.

The run works in its local folder. A thread copies what changed there: first everything else, then each checkpoint with
its manifest last. Object stores have no rename: a checkpoint counts as soon as its manifest is there, and no sooner. So
does the policy of the warm start with its ``config.json``.

    runs/search/            ─▶  s3://bucket/runs/search/
        metrics.jsonl               whole files, again whenever they changed
        checkpoints/step_000100     files, then manifest.json; removed in the opposite order
        checkpoints/latest, lock    stay local
"""

import json
import logging
import os
import re
import shutil
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from condensegrpo.core.errors import CondenseError, ConfigError, RunError
from condensegrpo.storage.files import TEMPORARY, shared_lock
from condensegrpo.storage.new_run import check_run_name
from condensegrpo.storage.run_folder import LATEST, MANIFEST, RunFolder

_LOG = logging.getLogger(__name__)
COPY_SECONDS = 30.0  # between two copies of what changed
_CHECKPOINT = re.compile(r"checkpoints/step_(\d+)/")
LOCAL = ("lock", f"checkpoints/{LATEST}", ".inspection.sqlite")  # files that are not copied
UNFINISHED = "origin/."  # how the paths of a warm start begin that has not ended; they are not copied
WARM = "origin/warm/config.json"  # the last file of the policy that a warm start ended with: the others are there


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteRun:
    """The copy of one run."""

    address: str  # such as s3://bucket/runs/search
    fs: Any  # fsspec's file system, untyped
    root: str  # the address as the file system writes paths

    @classmethod
    def at(cls, mirror: str, name: str) -> Self:
        """The copy of the run ``name`` below the address ``mirror``; nothing is read.

        Raises:
            ConfigError: no file system of fsspec has this address, or its package is not installed.
        """
        from fsspec.core import url_to_fs

        address = f"{mirror.rstrip('/')}/{name}"
        try:
            fs, root = url_to_fs(address)
        except (ImportError, ValueError) as error:
            raise ConfigError(
                f"reading mirror={mirror}: {error}. Wanted an address such as s3://bucket/runs, and the package of its "
                f"file system installed (s3fs, gcsfs, adlfs)."
            ) from error
        return cls(address=address, fs=fs, root=root.rstrip("/"))

    def files(self) -> dict[str, int]:
        """The sizes of all files, in bytes, by their path in the run's folder.

        Raises:
            RunError: the address cannot be read.
        """
        with self.errors("reading"):
            self.fs.invalidate_cache()
            try:
                found = self.fs.find(self.root, detail=True)
            except FileNotFoundError:
                return {}
            return {path[len(self.root) + 1 :]: int(info["size"]) for path, info in found.items()}

    def newest(self) -> int | None:
        """The step of the newest checkpoint that has its manifest; None: there is none.

        Raises:
            RunError: files of that checkpoint are missing, or the address cannot be read.
        """
        files = self.files()
        for step, folder in reversed(_steps(name for name in files if name.endswith(f"/{MANIFEST}"))):
            with self.errors("reading"), suppress(ValueError):  # a manifest cut off, by a store that shows parts
                sizes = json.loads(self.fs.cat_file(f"{self.root}/{folder}/{MANIFEST}"))["sizes"]
                for name, size in sizes.items():
                    if files.get(f"{folder}/{name}") != size:
                        raise RunError(
                            f"reading {self.address}/{folder}: {name} is missing or has not the {size} bytes of its "
                            f"manifest. Remove that checkpoint there to continue from the one before."
                        )
                return step
        return None

    def fetch(self, folder: Path) -> None:
        """Download all but older checkpoints and what is incomplete; the folder appears when all of it is there.

        Raises:
            RunError: the address cannot be read, or the folder exists.
        """
        newest = self.newest()
        temporary = folder.with_name(f".{folder.name}{TEMPORARY}fetched")
        shutil.rmtree(temporary, ignore_errors=True)
        with self.errors("downloading"):
            files = self.files()
            for name in files:
                steps = _steps([name])
                incomplete = _parent(name) == _parent(WARM) and WARM not in files
                if not incomplete and (not steps or steps[0][0] == newest):
                    (temporary / name).parent.mkdir(parents=True, exist_ok=True)
                    self.fs.get_file(f"{self.root}/{name}", str(temporary / name))
            temporary.rename(folder)

    @contextmanager
    def errors(self, doing: str) -> Iterator[None]:
        """The boundary to the file system, whose errors are of all kinds."""
        try:
            yield
        except CondenseError:
            raise
        except Exception as error:
            raise RunError(
                f"{doing} {self.address}: {type(error).__name__}: {error}. Check the address (mirror), the network and "
                f"the credentials of its client."
            ) from error


class Mirror:
    """Keeps the copy of a run's folder up to date. One process, the first rank's, uses it."""

    def __init__(self, run: RunFolder, remote: RemoteRun) -> None:
        """Read which files the copy has; raises ``RunError`` where that fails."""
        self._run, self._remote = run, remote
        self._copied: dict[str, tuple[int, int]] = {}  # bytes and time of change of what was copied, by path
        self._remote_files = set(remote.files())
        self._folders = {_parent(name) for name in self._remote_files}

    def copy(self) -> None:
        """Copy what changed, and remove what was removed. Nothing before the run has learned something.

        Raises:
            RunError: something cannot be copied; the next call goes on there.
        """
        if not self._run.learned:
            return
        checkpoints = self._checkpoints()  # first: of a checkpoint that is published meanwhile no file is missed
        files = self._files()
        with self._remote.errors("copying the run to"):
            for name in sorted(files, key=WARM.__eq__):
                if not name.startswith("checkpoints/"):
                    self._put(name)
            for folder in checkpoints:
                self._put_checkpoint(folder, [name for name in files if name.startswith(f"{folder}/")])
            abandoned = {folder for _, folder in _steps(files)} - set(checkpoints)
            kept = {name for name in files if _parent(name) not in abandoned}
            for name in sorted(self._remote_files - kept, key=lambda name: not name.endswith((f"/{MANIFEST}", WARM))):
                self._remove(name)

    def _files(self) -> list[str]:
        # not rglob: it fails at a folder that the run renames or removes meanwhile
        paths = (Path(folder, name) for folder, _, files in os.walk(self._run.path) for name in files)
        names = (path.relative_to(self._run.path).as_posix() for path in paths if path.is_file())
        copied = (name for name in names if name not in LOCAL and not name.startswith(UNFINISHED))
        return sorted(name for name in copied if TEMPORARY not in name)

    def _checkpoints(self) -> list[str]:
        """The folders of the published checkpoints, oldest first; those beyond ``latest`` were abandoned."""
        manifests = self._run.checkpoints.glob(f"step_*/{MANIFEST}")
        published = _steps(path.relative_to(self._run.path).as_posix() for path in manifests)
        pointer = self._run.checkpoints / LATEST
        latest = f"checkpoints/{pointer.read_text(encoding='utf-8').strip()}" if pointer.is_file() else None
        newest = max((step for step, folder in published if latest in (None, folder)), default=-1)
        return [folder for step, folder in published if step <= newest]

    def _put_checkpoint(self, folder: str, names: list[str]) -> None:
        manifest = f"{folder}/{MANIFEST}"
        state = self._state(manifest)
        if state is None or self._copied.get(manifest) == state:
            return
        try:
            with shared_lock(self._run.path / manifest):  # it is not pruned meanwhile
                if manifest in self._remote_files:
                    if self._is_there(manifest):  # an earlier process copied it
                        self._copied[manifest] = state
                        return
                    self._remove(manifest)  # of a checkpoint of this step that was replaced
                for name in names:
                    if name != manifest:
                        self._put(name)
                if self._state(manifest) == state:  # else it was saved again meanwhile, and the next copy goes on
                    self._put(manifest)
        except FileNotFoundError:
            if (self._run.path / manifest).exists():
                raise

    def _is_there(self, manifest: str) -> bool:
        """Whether the copy has this manifest, which has the hash of every file, and so this checkpoint."""
        with suppress(FileNotFoundError):
            there: bytes = self._remote.fs.cat_file(f"{self._remote.root}/{manifest}")
            return there == (self._run.path / manifest).read_bytes()
        return False

    def _put(self, name: str) -> None:
        state = self._state(name)
        if state is None or self._copied.get(name) == state:
            return
        target = f"{self._remote.root}/{name}"
        if _parent(name) not in self._folders:
            self._remote.fs.makedirs(_parent(target), exist_ok=True)
            self._folders.add(_parent(name))
        self._remote.fs.put_file(str(self._run.path / name), target)
        self._copied[name] = state
        self._remote_files.add(name)

    def _remove(self, name: str) -> None:
        with suppress(FileNotFoundError):
            self._remote.fs.rm_file(f"{self._remote.root}/{name}")
        self._remote_files.discard(name)
        self._copied.pop(name, None)

    def _state(self, name: str) -> tuple[int, int] | None:
        """Bytes and time of the last change; None: the file is gone."""
        with suppress(OSError):
            status = (self._run.path / name).stat()
            return status.st_size, status.st_mtime_ns
        return None


@contextmanager
def mirrored(run: RunFolder, remote: RemoteRun) -> Iterator[None]:
    """Copy a run's folder in a thread while the block runs, and once more at its end.

    An address that cannot be reached for a while delays nothing: the copy is repeated.

    Raises:
        RunError: the copy at the end failed. An error of the block comes before it.
    """
    mirror, ended = Mirror(run, remote), threading.Event()

    def copy_repeatedly() -> None:
        while not ended.wait(COPY_SECONDS):
            try:
                mirror.copy()
            except RunError as error:
                _LOG.warning("%s The copy is repeated in %g seconds", error, COPY_SECONDS)

    thread = threading.Thread(target=copy_repeatedly, name="mirror", daemon=True)
    thread.start()
    try:
        yield
    except BaseException:
        ended.set()
        thread.join()
        with suppress(RunError):
            mirror.copy()
        raise
    ended.set()
    thread.join()
    mirror.copy()


def check_mirror(run: RunFolder, remote: RemoteRun, *, continued: bool, overwrite: bool) -> None:
    """Check that a run may be copied to an address: it would replace what is there.

    Raises:
        RunError: another run is there, or newer checkpoints of this one, or it cannot be read.
    """
    if overwrite:
        return
    folders = (f"checkpoints/{path.name}/" for path in run.checkpoints.glob("step_*"))
    newest, local = remote.newest(), max((step for step, _ in _steps(folders)), default=-1)
    if newest is not None and newest > local:
        found = f"a checkpoint of step {newest}, which {run.path} has not" if continued else "a run"
        raise RunError(
            f"reading mirror: {remote.address} holds {found}. Continue that run where {run.path} does not exist "
            f"(condensegrpo train CONFIG --continue), or give this one another name or mirror."
        )


def fetch_run(run: RunFolder, remote: RemoteRun, *, downloads: bool, seconds: float) -> bool:
    """Bring back a run whose folder is not there from its copy, if that has learned something; returns whether it has.

    That is a checkpoint, or the policy of the warm start.

    Args:
        downloads: this process does; False: it waits for another one that does.
        seconds: to wait.

    Raises:
        RunError: the copy cannot be read, or did not arrive in time; or the folder holds something else than a run.
    """
    if run.trained:
        return True
    if remote.newest() is None and WARM not in remote.files():
        return False
    if downloads:
        check_run_name(run.path, overwrite=False)
        shutil.rmtree(run.path, ignore_errors=True)  # nothing was learned in it
        remote.fetch(run.path)
        return True
    deadline = time.monotonic() + seconds
    while not run.trained:
        if time.monotonic() > deadline:
            raise RunError(f"waiting for {run.path}: the first rank did not download it from {remote.address}.")
        time.sleep(0.2)
    return True


def _parent(name: str) -> str:
    return name.rpartition("/")[0]


def _steps(names: Iterable[str]) -> list[tuple[int, str]]:
    """Steps and folders of the checkpoints that files belong to, ascending."""
    matches = filter(None, map(_CHECKPOINT.match, names))
    return sorted({(int(match[1]), match[0].rstrip("/")) for match in matches})
