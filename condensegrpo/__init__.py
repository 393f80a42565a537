"""Multi-turn GRPO for language-model agents under context compaction.

``docs/explanation/architecture.md`` lists the floors of the package. Importing this package imports nothing else: the
names of ``api.py`` are loaded when they are first used.
"""

import os
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING
from warnings import filterwarnings

if TYPE_CHECKING:
    from condensegrpo.api import Rollout, Rollouts, Run, evaluate, rollout, train

__version__ = "0.1.0"
CPU_INFO = Path("/proc/cpuinfo")  # of Linux
__all__ = ["Rollout", "Rollouts", "Run", "__version__", "evaluate", "rollout", "train"]


if CPU_INFO.exists() and "GenuineIntel" in CPU_INFO.read_text(encoding="utf-8", errors="replace")[:1000]:
    # before anything imports torch: on Intel's processors MKL otherwise sums in an order that depends on where in
    # memory a matrix lies, and two runs of one seed differ in their last bits
    os.environ.setdefault("MKL_CBWR", "AUTO,STRICT")


# of tqdm, which transformers imports: in a notebook without ipywidgets its bars are drawn as text
filterwarnings("ignore", message="IProgress not found")


def __getattr__(name: str) -> object:
    if name in __all__:
        return getattr(import_module("condensegrpo.api"), name)
    raise AttributeError(f"module 'condensegrpo' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
