"""A vLLM server as a child process: the flags and devices it runs with, its start, its log and its end."""

import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

import torch

from condensegrpo.core.errors import SamplerError, ServerUnreachable
from condensegrpo.core.process_guard import STOP_SECONDS
from condensegrpo.learner.model_folder import max_positions
from condensegrpo.learner.ranks import machines, rank
from condensegrpo.samplers.vllm.request import INSTALL
from condensegrpo.samplers.vllm.settings import NCCL, NO_COMPILER, ServedModel, ServerSettings, engine_arguments
from condensegrpo.samplers.vllm.weights import adapter_arguments, native_rank
from condensegrpo.samplers.vllm_server.server import TOKEN_VARIABLE

DEVICES_VARIABLE = "CUDA_VISIBLE_DEVICES"
NAME = "policy"  # of the model in the server's API
LOOPBACK = "127.0.0.1"
SHORTEST_BATCH = 8192  # tokens that the engine takes in one step, at least
ERROR = re.compile(r"\b\w+(Error|Exception): ")  # an exception with a message, as Python prints it
LAST_LINES = 12  # of a log, in an error message
LAUNCHED = {  # variables by which torchrun and deepspeed describe ranks
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "LOCAL_SIZE", "MASTER_ADDR", "MASTER_PORT"),
    *("GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK", "ROLE_NAME", "ROLE_WORLD_SIZE", "CROSS_RANK", "CROSS_SIZE"),
}
ELASTIC = "TORCHELASTIC_"  # begins further ones of torchrun


def check_vllm_installed() -> None:
    """Raise ``SamplerError`` where vLLM is missing."""
    if find_spec("vllm") is None:
        raise SamplerError(f"starting a vLLM server: vLLM is not installed. {INSTALL}.")


def server_command(model: ServedModel, settings: ServerSettings, *, host: str, port: int) -> list[str]:
    """The command line of a server. The token is not part of it: see ``environment``."""
    gpu, code = torch.cuda.is_available(), "condensegrpo.samplers.vllm_server.server"
    arguments: dict[str, object] = {
        "model": model.path,
        "served_model_name": NAME,
        "dtype": model.dtype,
        "max_model_len": model.max_model_len,
        "host": host,
        "port": port,
        "middleware": f"{code}.RequireToken",
        "worker_extension_cls": f"{code}.ServedWeights",
        "enable_scale_out": True,
        "disable_uvicorn_access_log": True,
        **engine_arguments(settings, gpu=gpu),
    }
    if not gpu:
        longest = model.max_model_len or max_positions(model.path) or 0
        arguments["max_num_batched_tokens"] = max(longest, SHORTEST_BATCH)
    lora_rank = native_rank(model.lora, dtype=model.dtype)
    if settings.weights == NCCL:
        arguments["weight_transfer_config"] = '{"backend": "nccl"}'
    elif model.lora is not None and lora_rank is not None:
        arguments |= adapter_arguments(model.lora, lora_rank)
    return [sys.executable, "-m", code, *_flags(arguments), *settings.flags]


def _flags(arguments: Mapping[str, object]) -> Iterator[str]:
    """Flags: {"max_model_len": 8, "enforce_eager": False}  ─▶  --max-model-len 8 --no-enforce-eager."""
    for name, value in arguments.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            yield f"--{flag}" if value else f"--no-{flag}"
        elif value is not None:
            yield from (f"--{flag}", *map(str, value if isinstance(value, list) else [value]))


def environment(token: str, settings: ServerSettings, *, device: str | None = None) -> dict[str, str]:
    """The variables of a server's process: the caller's, the token, and the switch of the routes that change weights.

    Args:
        device: its ``CUDA_VISIBLE_DEVICES``.
    """
    required = {TOKEN_VARIABLE: token, "VLLM_SERVER_DEV_MODE": "1", "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"}
    if device is not None:
        required[DEVICES_VARIABLE] = device
    quiet = {
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": "600",  # seconds; short ones may end a connection as a request starts
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # otherwise every replica binds its threads to the same cores
    }
    if not torch.cuda.is_available():
        quiet["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the worker runs in the engine's process: a third less to start
        if settings.enforce_eager is not False:
            quiet[NO_COMPILER] = "1"
    # of the learner's launcher: vLLM would join its ranks, and wait for torchrun's store in place of its own
    inherited = {
        name: value for name, value in os.environ.items() if name not in LAUNCHED and not name.startswith(ELASTIC)
    }
    return {**quiet, **inherited, **required}


def check_free(host: str, port: int) -> None:
    """Raise ``SamplerError`` where a server cannot listen, before it loads a model."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise SamplerError(
                f"starting a vLLM server: it cannot listen on {host}:{port}: {error.strerror}. Choose another --port, "
                f"or end the process that listens on it."
            ) from error


def free_port() -> int:
    """A free port of the loopback interface. Another process may take it before it is used."""
    with socket.socket() as probe:
        probe.bind((LOOPBACK, 0))
        return int(probe.getsockname()[1])


class ServerProcess:
    """A server that the sampler starts: it listens on the loopback interface and ends with the run in every case."""

    def __init__(
        self, model: ServedModel, settings: ServerSettings, *, token: str, log: Path, device: str | None = None
    ) -> None:
        self._model = model
        self._settings = settings
        self._environment = environment(token, settings, device=device)
        self._process: subprocess.Popen[bytes] | None = None  # the guard, the parent of the server
        self._port = free_port()
        self.url = f"http://{LOOPBACK}:{self._port}"
        self.log = log

    def start(self) -> None:
        """Start it; it answers some seconds later. It ends when its standard input closes."""
        line = server_command(self._model, self._settings, host=LOOPBACK, port=self._port)
        line[3:3] = ["--watched", str(self.log.parent)]
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                line,
                env=self._environment,
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C reaches the run alone
            )

    def check_alive(self, *, served: bool = False) -> None:
        """Raise an error with the end of its log if it has ended.

        Args:
            served: others may take over from it: the error is ``ServerUnreachable``, and a request is retried.
        """
        code = None if self._process is None else self._process.poll()
        if code is None:
            return
        if served:
            raise ServerUnreachable(
                f"sampling from {self.url}: the server ended with code {code}, and a run starts its servers only once. "
                f"Resume the run (condensegrpo train --resume RUN); if the server lacked memory, lower "
                f"sampler.options.max_model_len first. The end of its log:\n{self.log_excerpt()}"
            )
        raise SamplerError(
            f"starting a vLLM server for {self._model.path}: it ended with code {code}. The end of "
            f"its log {self.log}:\n{self.log_excerpt()}\nIf it lacks memory for keys and values, lower "
            f"sampler.options.max_model_len or raise server.kv_cache_gib (on a GPU, server.gpu_memory_utilization). "
            f"If the model does not support LoRA, set model.lora.sampler=merged."
        )

    def log_excerpt(self) -> str:
        """The first error in its log and the end of it: the last error often only reports that there was an error."""
        lines = self.log.read_text(encoding="utf-8", errors="replace").splitlines() if self.log.exists() else []
        first = [line for line in lines[:-LAST_LINES] if ERROR.search(line)][:1]
        return "\n".join([*first, *(["…"] if first else []), *lines[-LAST_LINES:]])

    def stop(self) -> None:
        """End all its processes: the guard does, with SIGTERM first, then SIGKILL. May be called twice."""
        process, self._process = self._process, None
        if process is None:
            return
        if process.poll() is None:
            process.terminate()
            with suppress(subprocess.TimeoutExpired):
                process.wait(2 * STOP_SECONDS)
        process.kill()
        process.wait()
        if process.stdin is not None:
            process.stdin.close()


def server_devices(
    visible: tuple[str, ...], *, ranks: int, rank: int, replicas: int, each: int
) -> tuple[str | None, ...]:
    """``CUDA_VISIBLE_DEVICES`` of every server that a rank starts; None: that of the rank.

        visible   0 1 2 3 4 5 6 7        two ranks, each with one server of tensor_parallel_size 3
        learner   0 1
        servers       2 3 4|5 6 7

    No server gets a device of the learner, and none is given out twice. One process with one device shares it with one
    server. Where no device is visible, servers run on the CPU.

    Args:
        visible: names of the devices, as numbers or UUIDs. The ranks of this machine compute on the first ones.
        ranks: of the learner on this machine.
        rank: this one among them, from 0.
        replicas: servers of every rank.
        each: devices of a server (``tensor_parallel_size``).
    """
    if not visible or (ranks == replicas == each == len(visible) == 1):
        return (None,) * replicas
    needed = ranks + ranks * replicas * each
    if needed > len(visible):
        raise SamplerError(
            f"starting {replicas} servers for each of {ranks} ranks on this machine: found {len(visible)} devices "
            f"({', '.join(visible)}), wanted {needed}: {ranks} for the learner and {replicas} x {each} for the servers "
            f"of each rank. Show every rank all devices, start fewer servers (sampler.options.replicas, "
            f"server.tensor_parallel_size), name devices to share (server.devices), or start the servers apart from "
            f"the run: condensegrpo serve, sampler.options.urls."
        )
    first = ranks + rank * replicas * each
    return tuple(",".join(visible[start : start + each]) for start in range(first, first + replicas * each, each))


def visible_devices(mask: str | None, count: int) -> tuple[str, ...]:
    """Names of the devices that this process sees, as a mask for another process can repeat them.

    CUDA reads a mask up to its first invalid entry, such as -1; ``count`` is the number that it found.
    """
    if mask is None:
        return tuple(map(str, range(count)))
    return tuple(name.strip() for name in mask.split(",")[:count])


def devices_of(settings: ServerSettings, replicas: int) -> tuple[str | None, ...]:
    """The devices of this rank's servers: those that are set, or free ones. Every rank must call it."""
    all_ranks = machines()
    if settings.devices:
        return settings.devices
    here = all_ranks[rank()]
    return server_devices(
        visible_devices(os.environ.get(DEVICES_VARIABLE), torch.cuda.device_count()),
        ranks=all_ranks.count(here),
        rank=all_ranks[: rank()].count(here),
        replicas=replicas,
        each=settings.tensor_parallel_size,
    )
