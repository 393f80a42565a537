"""The trajectory engine: from a problem to a scored trajectory.

It imports ``core`` only; samplers, condensers, tools and rewards reach it as arguments. Start with ``episode.py``, then
``group.py``. The folder has the name of a function of ``api.py``: ``condensegrpo.rollout(…)`` calls that.
"""

import sys
from importlib import import_module
from types import ModuleType


class _CallableModule(ModuleType):
    def __call__(self, *arguments: object, **options: object) -> object:
        return import_module("condensegrpo.api").rollout(*arguments, **options)


sys.modules[__name__].__class__ = _CallableModule
