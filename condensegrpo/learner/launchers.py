"""How a process learns its rank and its device: the variables of torchrun and deepspeed, and those of srun.

Standard library only: the command line reads the rank before it imports torch.
"""

import re
from collections.abc import Mapping, MutableMapping

from condensegrpo.core.errors import ConfigError

FIRST_PORT, PORTS = 20_000, 10_000  # of MASTER_PORT; below the ports that Linux gives to outgoing connections
EVALUATING = "evaluating"
EVALUATE_ALONE = (
    "an evaluation runs in one process. Start it without torchrun, deepspeed or srun; several GPUs sample for it "
    "through servers (docs/how-to/sample-with-vllm.md)"
)
LAUNCH = (
    "Launch with torchrun, deepspeed or srun, one process per device; for one process leave the launcher out. See "
    "docs/how-to/first-gpu-run.md"
)


def join_launch(environment: MutableMapping[str, str]) -> None:
    """Set the variables that torchrun would set, where srun started this process as one of several tasks.

        SLURM_PROCID=5 SLURM_LOCALID=1 SLURM_NTASKS=8 SLURM_STEP_NODELIST=gpu[07-08] SLURM_JOB_ID=4711 SLURM_STEP_ID=0
    ─▶  RANK=5 LOCAL_RANK=1 WORLD_SIZE=8 MASTER_ADDR=gpu07 MASTER_PORT=26041

    A process with a RANK keeps it, such as one that torchrun started inside a task. MASTER_ADDR and MASTER_PORT that
    are set are kept as well.
    """
    if "RANK" in environment:
        return
    in_step = "SLURM_STEP_ID" in environment  # not in a batch script, which is one process of any number of tasks
    tasks = environment.get("SLURM_STEP_NUM_TASKS") or environment.get("SLURM_NTASKS", "1")
    if in_step and int(tasks) > 1:
        try:
            nodes = environment.get("SLURM_STEP_NODELIST") or environment["SLURM_JOB_NODELIST"]
            number = 31 * int(environment["SLURM_JOB_ID"]) + int(environment["SLURM_STEP_ID"])
            environment.update(
                {
                    "RANK": str(int(environment["SLURM_PROCID"])),
                    "LOCAL_RANK": str(int(environment["SLURM_LOCALID"])),
                    "WORLD_SIZE": tasks,
                    "MASTER_ADDR": environment.get("MASTER_ADDR") or first_host(nodes),
                    "MASTER_PORT": environment.get("MASTER_PORT") or str(FIRST_PORT + number % PORTS),
                }
            )
        except (KeyError, IndexError, ValueError) as error:
            raise ConfigError(
                f"starting rank ? of {tasks}: srun started {tasks} tasks, and its variables do not say which one this "
                f"is ({type(error).__name__}: {error}). Set RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT "
                f"in each task. {LAUNCH}."
            ) from error
    for name in ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE"):
        if "RANK" not in environment and int(environment.get(name, "1")) > 1:
            raise ConfigError(
                f"starting rank ? of {environment[name]}: found {name}={environment[name]} and no RANK: mpirun started "
                f"{environment[name]} processes, each of which would train by itself. {LAUNCH}."
            )


def launched_rank(environment: Mapping[str, str]) -> int:
    """The rank of this process, once ``join_launch`` has set it; 0 without a launcher."""
    return int(environment.get("RANK", "0"))


def check_alone(environment: MutableMapping[str, str], doing: str = EVALUATING, remedy: str = EVALUATE_ALONE) -> None:
    """Check that no launcher started this process as one of several."""
    join_launch(environment)
    size = environment.get("WORLD_SIZE", "1")
    if int(size) > 1:
        raise ConfigError(f"{doing}: a launcher started {size} processes, and {remedy}.")


def first_host(nodelist: str) -> str:
    """The first host of a list as SLURM writes it: ``gpu[07-08,11],login`` ─▶ gpu07."""
    name = re.findall(r"(?:\[[^\]]*\]|[^,\[])+", nodelist)[0]
    return re.sub(r"\[(\d+)[^\]]*\]", r"\1", name)


def device_index(local_rank: int, visible: int) -> int:
    """Which of the devices that a process sees is its own: the only one, or else that of its local rank.

    Without a visible device, on a CPU, it is the local rank, which nothing uses.
    """
    if visible == 1:  # such as with srun --gpus-per-task=1: each task sees its own
        return 0
    if 0 < visible <= local_rank:
        raise ConfigError(
            f"choosing the device of local rank {local_rank}: this process sees {visible} devices, and every process "
            f"of a machine needs its own. Start at most {visible} processes on a machine (torchrun --nproc_per_node "
            f"{visible}), or make more devices visible (CUDA_VISIBLE_DEVICES)."
        )
    return local_rank
