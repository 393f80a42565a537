"""``doctor --gpu``: tries in a few minutes what a run will do on this machine's GPUs, one process a check."""

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from condensegrpo.cli import theme
from condensegrpo.cli.findings import Finding, Level, ok, problem

CHECKS = "condensegrpo.cli.gpu_checks"
SECONDS = 300.0  # of one check
LAST = 1200  # characters of what a check printed before it died
INSTALL = "install the CUDA build of torch for your driver (nvidia-smi shows it), or use a machine with a GPU"
PHASES: Mapping[str, str] = {  # the name of a check → what the user reads while it runs
    "device": "multiplying on a device",
    "ranks": "adding up over the devices",
    "attention": "comparing kernels of attention",
    "sampler": "sampling, sleeping, learning a step, sending weights, sampling again",
    "transfer": "sending weights to a server on another device",
    "learner": "learning two steps on full micro-batches",
}
TOGETHER = ("ranks", "learner")  # checks that run on all devices at once
HANGS: Mapping[str, str] = {
    "ranks": "NCCL_DEBUG=INFO says where it stops; NCCL_P2P_DISABLE=1 or NCCL_IB_DISABLE=1 tries another way",
    "transfer": "NCCL_DEBUG=INFO says where it stops; sampler.options.server.weights=folder needs no NCCL",
}
AGAIN = f"run it alone to see all it prints: python -m {CHECKS}"


def gpu_findings(config: str | None, overrides: Sequence[str]) -> list[Finding]:
    """The findings of every check on the devices that torch sees."""
    import torch

    count = torch.cuda.device_count()
    if not count:
        return [problem("GPU", f"torch {torch.__version__} sees none", INSTALL)]
    return checked(count, config, overrides)


def checked(devices: int, config: str | None, overrides: Sequence[str]) -> list[Finding]:
    """The findings of every check, with as many ranks as there are devices."""
    findings: list[Finding] = []
    console = theme.console(sys.stderr)
    for name, phase in PHASES.items():
        if name in ("ranks", "transfer") and devices < 2:
            findings.append(ok(name, "not tried: it needs two devices"))
            continue
        with console.status(f"{phase} …"):
            findings += run_check(name, (*([config] if config else []), *overrides), ranks=devices)
    return findings


def run_check(
    name: str,
    arguments: Sequence[str],
    *,
    ranks: int,
    seconds: float = SECONDS,
    module: str = "condensegrpo.cli.gpu_checks",
) -> list[Finding]:
    """The findings of a check in processes of its own; that it hangs or dies is a finding too."""
    with tempfile.TemporaryDirectory(prefix="condensegrpo-") as place:
        file, launcher = Path(place) / "findings.json", ["-m", module]
        if name in TOGETHER and ranks > 1:
            launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", *launcher]
        command = [sys.executable, *launcher, name, str(file), *arguments]
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
        ) as process:
            try:
                printed = process.communicate(timeout=seconds)[0][-LAST:].strip()
            except subprocess.TimeoutExpired:
                return [problem(name, f"no answer after {seconds:.0f} s", HANGS.get(name, AGAIN))]
            finally:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)  # its ranks too
        if not file.is_file():
            text = f"the check ended with code {process.returncode}: {printed}"
            return [problem(name, text, HANGS.get(name, AGAIN))]
        findings = json.loads(file.read_text(encoding="utf-8"))
    return [Finding(**{**each, "level": Level(each["level"])}) for each in findings]
