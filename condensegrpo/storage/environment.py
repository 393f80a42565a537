"""``environment.json`` of a run folder: what the run was made with. Imports none of the packages that it names."""

import hashlib
import json
import os
import platform
import shlex
import socket
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from datetime import datetime
from importlib import metadata
from pathlib import Path

from condensegrpo.core.credentials import redacted
from condensegrpo.storage.files import read_object, write_atomically

ENVIRONMENT = "environment.json"
PACKAGES = ("condensegrpo", "torch", "transformers", "deepspeed", "peft", "vllm", "datasets", "pydantic")


def sha256_of(path: Path) -> str:
    """The hash of a file, or of the files of a folder one after another."""
    digest = hashlib.sha256()
    for file in sorted(each for each in path.iterdir() if each.is_file()) if path.is_dir() else (path,):
        with file.open("rb") as opened:
            hashlib.file_digest(opened, lambda: digest)
    return digest.hexdigest()


def edited_inputs(
    run: Path, writer: Callable[[str], Path | None] = lambda _: None, hash_of: Callable[[Path], str] = sha256_of
) -> tuple[str, ...]:
    """The plug-ins and writers that are not what they were when a run began to use them, as far as that is known.

    A file that is not there is not among them: the run may have been moved.

    Args:
        writer: the model folder of a ``rollout.condense.writer``; None: it is not known.
        hash_of: ``sha256_of``; of several runs it may remember what they share.
    """
    plugins, writers = _known(run, "plugins"), _known(run, "writers")
    inputs = {**{name: Path(name) for name in plugins}, **{name: writer(name) for name in writers}}
    known = plugins | writers
    present = ((name, path) for name, path in inputs.items() if path is not None and path.exists())
    return tuple(name for name, path in present if hash_of(path) != known[name])


def _known(run: Path, kind: str) -> dict[str, str]:
    """The inputs of a kind with their hashes when a run began to use them."""
    inputs = read_object(run / ENVIRONMENT).get(kind)
    return inputs if isinstance(inputs, dict) else {}


def write_environment(folder: Path, *, plugins: Iterable[Path] = (), writers: Mapping[str, Path] = {}) -> str:
    """Write ``environment.json``: versions, command line, git revision, inputs with hashes, and hardware.

    A value that is not known, or the version of a package that is not installed, is null. Resuming writes it again, but
    for the hashes of known inputs.

    Args:
        plugins: the files of the run's plug-ins.
        writers: the model folders that write for condensers, by ``rollout.condense.writer``.

    Returns:
        The command line, versions and hardware as lines for the log, which keeps those of every start.
    """
    revision = _output("git", "rev-parse", "HEAD")
    gpus = _output("nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader")
    command = redacted(shlex.join(sys.argv))
    known = {kind: _known(folder, kind) for kind in ("plugins", "writers")}
    packages: dict[str, str | None] = dict.fromkeys(PACKAGES)
    for name in PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            packages[name] = metadata.version(name)
    environment = {
        "started": datetime.now().astimezone().isoformat(" ", "seconds"),
        "host": socket.gethostname(),
        "command": command,
        "folder": os.getcwd(),
        "python": platform.python_version(),
        "packages": packages,
        "plugins": {str(file): sha256_of(file) for file in plugins if file.is_file()} | known["plugins"],
        "writers": {name: sha256_of(writers[name]) for name in writers.keys() - known["writers"]} | known["writers"],
        "git_revision": revision,
        "git_modified": bool(_output("git", "status", "--porcelain", "--untracked-files=no")) if revision else None,
        "platform": platform.platform(),
        "processor": _processor(),
        "cpus": os.cpu_count(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "gpus": gpus.splitlines() if gpus else [],
    }
    write_atomically(folder / ENVIRONMENT, json.dumps(environment, indent=2) + "\n")
    versions = ", ".join(f"{name} {version}" for name, version in packages.items() if version)
    return (
        f"command: {command}\nversions: Python {platform.python_version()}, {versions}\n"
        f"git revision: {revision or 'none'}\n"
        f"hardware: {_processor()}, {os.cpu_count()} CPUs, {'; '.join(gpus.splitlines()) if gpus else 'no GPU'}"
    )


def _processor() -> str | None:
    """The model of the processor, as Linux names it."""
    file = Path("/proc/cpuinfo")
    lines = file.read_text(encoding="utf-8").splitlines() if file.is_file() else []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), None)


def _output(*command: str) -> str | None:
    """What a program prints; None: it is missing, fails or does not end within 10 seconds."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or None
