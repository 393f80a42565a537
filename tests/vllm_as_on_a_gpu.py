"""vLLM's CPU build as it runs on a GPU: its V2 runner, scheduling ahead of the results, and a compiled model.

Triton's kernels are interpreted, and Dynamo's graphs run as they are.
"""

import torch

ENVIRONMENT = {} if torch.cuda.is_available() else {"TRITON_INTERPRET": "1", "VLLM_CPU_CI_ENV": "1"}  # of the process


def as_on_a_gpu() -> None:
    """Call it before vLLM is imported, in a process with this environment."""
    if torch.cuda.is_available():
        return
    from triton.backends import Backend, backends
    from triton.backends.driver import DriverBase
    from triton.runtime.driver import driver

    class Cpu(DriverBase):  # type: ignore[misc]  # untyped
        """A device for kernels that are interpreted."""

        @staticmethod
        def is_active() -> bool:
            return True

        def get_active_torch_device(self) -> torch.device:
            return torch.device("cpu")

        def get_current_device(self) -> int:
            return 0

    Cpu.__abstractmethods__ = frozenset()  # what compiled kernels need
    backends["cpu"] = Backend(compiler=backends["nvidia"].compiler, driver=Cpu)
    driver.set_active(Cpu())

    from vllm.config import VllmConfig
    from vllm.platforms.cpu import CpuPlatform

    checked = CpuPlatform.check_and_update_config

    def scheduling_ahead(config: VllmConfig) -> None:
        checked(config)
        config.scheduler_config.async_scheduling = True

    CpuPlatform.check_and_update_config = staticmethod(scheduling_ahead)
