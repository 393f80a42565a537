"""Measures the peak memory of each phase of a process."""

import ctypes
import gc
from pathlib import Path

import torch


class Meter:
    """The peak of each phase above the first state of the process.

    It is torch's ``max_memory_allocated`` on a GPU, and resident memory (VmHWM) on a CPU, reset between phases.
    """

    def __init__(self) -> None:
        self._gpu = torch.cuda.is_available()
        gc.collect()
        if not self._gpu:
            ctypes.CDLL("libc.so.6").malloc_trim(0)
        self._reset()
        self._first = self._peak()
        self.peaks: dict[str, int] = {}

    def ends(self, phase: str) -> None:
        """What was taken since the last phase ended belongs to this one."""
        self.peaks[phase] = max(self.peaks.get(phase, 0), self._peak() - self._first)
        self._reset()

    def _reset(self) -> None:
        if self._gpu:
            torch.cuda.reset_peak_memory_stats()
        else:
            Path("/proc/self/clear_refs").write_text("5", encoding="ascii")

    def _peak(self) -> int:
        if self._gpu:
            return int(torch.cuda.max_memory_allocated())
        status = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
        return int(next(line.split()[1] for line in status if line.startswith("VmHWM:"))) * 1024
