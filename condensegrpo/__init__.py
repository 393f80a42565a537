"""Multi-turn GRPO for language-model agents whose context is condensed before every turn.

The floors of the house are listed in ``docs/explanation/architecture.md``. Importing this package imports nothing else:
the names of ``api.py`` are loaded when they are first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from condensegrpo.api import Rollout, Rollouts, Run, evaluate, rollout, train

__version__ = "0.1.0"
__all__ = ["Rollout", "Rollouts", "Run", "__version__", "evaluate", "rollout", "train"]


def __getattr__(name: str) -> object:
    if name == "rollout":  # the folder of the engine, which is callable: it would replace a function of the same name
        return import_module("condensegrpo.rollout")
    if name in __all__:
        return getattr(import_module("condensegrpo.api"), name)
    raise AttributeError(f"module 'condensegrpo' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
