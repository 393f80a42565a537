"""Two ranks of ``doctor --gpu`` that share an import of vLLM, which takes nine seconds: a program for ``forked.py``."""

import os
import sys
import traceback

from condensegrpo.cli import doctor
from condensegrpo.samplers.vllm.engine import SETTINGS, _undisturbed
from condensegrpo.samplers.vllm.settings import NO_COMPILER
from condensegrpo.samplers.vllm_server.process import free_port


def main() -> None:
    """A trial on two forks of this process, with the variables that ``torchrun`` sets."""
    os.environ.update({NO_COMPILER: "1", **SETTINGS})  # as ``VllmEngine`` imports it
    with _undisturbed():
        import vllm.v1.worker.cpu_worker  # noqa: F401  before the fork
    group = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    ranks = [_forked({**group, "RANK": rank, "LOCAL_RANK": rank}) for rank in ("0", "1")]
    assert [os.waitpid(rank, 0)[1] for rank in ranks] == [0, 0]


def _forked(variables: dict[str, str]) -> int:
    if pid := os.fork():
        return pid
    os.environ.update(variables)
    try:
        doctor.main()
    finally:
        failed = sys.exc_info()[0] is not None
        if failed:
            traceback.print_exc()
        os._exit(failed)
