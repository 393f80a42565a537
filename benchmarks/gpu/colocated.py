"""vLLM in the learner's process against a server of its own on the same GPU.

    cd benchmarks && python -m gpu.colocated --out OUT                    5 minutes: 0.14 B parameters

    calls   sampling, sleep, wake and new weights of either, the server's by CUDA IPC and by a folder
    train   whole steps of ``train``: in process, with the server (weights by a folder, by CUDA IPC), with workers

OUT/colocated.jsonl has a line for every call and step. Issue: the server stays alone if its step is at most 5 % slower.
"""

import argparse
import json
import os
import secrets
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from rollout_sides import Setting, opened_sampler, weights_of
from rollout_world import World, engine, play
from sides import Run

from condensegrpo.learner.devices import synchronize
from condensegrpo.samplers.vllm.settings import ServedModel, ServerSettings
from condensegrpo.samplers.vllm_server.process import ServerProcess
from condensegrpo.samplers.vllm_server.server import TOKEN_VARIABLE
from gpu.ipc_servers import ENVIRONMENT, FLAGS
from gpu.policy import random_policy
from gpu.record import device, parser, recording, side
from gpu.rollout_costs import ours, setting_of, world_options, worlds_of
from gpu.training import train

TRAINED = {  # overrides of rand.yaml
    "in process": ["sampler.name=vllm"],
    "server": ["sampler.name=vllm_server", "sampler.options.server.gpu_memory_utilization=0.4"],
    "server, ipc": [
        f"sampler.name={Path(__file__).with_name('ipc_servers.py')}:IpcServers",
        "sampler.options.server.gpu_memory_utilization=0.4",
        f"sampler.options.server.flags={json.dumps(FLAGS)}",
    ],
    "server, workers": [
        "sampler.name=vllm_server",
        "sampler.options.server.gpu_memory_utilization=0.4",
        "rollout.workers.processes=2",
    ],
}


def served(setting: Setting) -> Run:
    """A server beside this process; a run plays a world, and on a GPU has it sleep, wake and take weights by IPC."""
    gpu = torch.cuda.is_available()
    token = os.environ[TOKEN_VARIABLE] = secrets.token_urlsafe(24)
    os.environ.update(ENVIRONMENT)
    flags = ("--enable-sleep-mode", *FLAGS) if gpu else ()
    settings = ServerSettings(gpu_memory_utilization=0.4, flags=flags)
    model = ServedModel(path=str(setting.folder), dtype=setting.dtype, max_model_len=setting.longest)
    folder = Path(tempfile.mkdtemp())  # which ends with the server
    server = ServerProcess(model, settings, token=token, log=folder / "server.log")
    server.start()  # it ends with this process
    post = partial(posted, server.url, token)
    while not _answers(server):
        time.sleep(0.2)
    sampler = opened_sampler(replace(setting, options={"urls": (server.url,)}), "vllm_server")
    weights = [(name, tensor.to(device())) for name, tensor in weights_of(setting.folder)]
    by_ipc = ipc_update(server.url, token, setting.folder) if gpu else None

    def run(world: World) -> dict[str, float]:
        parts, cpu = engine(setting.folder, sampler, world), time.process_time()
        found = {"seconds": seconds_of(lambda: play(parts, world)), "cpu": time.process_time() - cpu}
        if by_ipc is not None:
            found["sleep"] = seconds_of(lambda: post("/sleep?level=2"))
            found["wake"] = seconds_of(lambda: post("/wake_up?tags=weights"))
            found["update"] = seconds_of(by_ipc)
            found["wake_cache"] = seconds_of(lambda: post("/wake_up?tags=kv_cache"))
        found["update_folder"] = seconds_of(lambda: sampler.update(weights, sampler.version + 1))
        return found

    return run


def seconds_of(call: Callable[[], object]) -> float:
    """Seconds of a call and of what it starts on the GPU."""
    synchronize()
    began = time.monotonic()
    call()
    synchronize()
    return time.monotonic() - began


def posted(url: str, token: str, path: str) -> None:
    """A request without a body."""
    headers = {"Authorization": f"Bearer {token}"}
    with urllib.request.urlopen(urllib.request.Request(url + path, method="POST", headers=headers), timeout=120):
        pass


def _answers(server: ServerProcess) -> bool:
    server.check_alive()
    try:
        with urllib.request.urlopen(f"{server.url}/health", timeout=5):
            return True
    except (urllib.error.URLError, TimeoutError):
        return False


def ipc_update(url: str, token: str, policy: Path) -> Callable[[], None]:
    """A call that gives a server the weights of a policy on this GPU by vLLM's native transfer."""
    import requests
    from transformers import AutoModelForCausalLM
    from vllm.distributed.weight_transfer.base import ModuleSource
    from vllm.distributed.weight_transfer.clients import HTTPVLLMWeightSyncClient
    from vllm.distributed.weight_transfer.ipc_engine import IPCTrainerInitInfo, IPCTrainerWeightTransferEngine

    class Client(HTTPVLLMWeightSyncClient):  # type: ignore[misc]  # untyped
        """With the server's token."""

        def _post(self, path: str, json: object = None) -> None:
            headers = {"Authorization": f"Bearer {token}"}
            requests.post(f"{url}/{path}", json=json, headers=headers, timeout=120).raise_for_status()

    model = AutoModelForCausalLM.from_pretrained(policy).to(device())
    transfer = IPCTrainerWeightTransferEngine.trainer_init(
        IPCTrainerInitInfo(packed=True), client=Client(url), source=ModuleSource(model)
    )
    send: Callable[[], None] = transfer.send_weights
    return send


def parse() -> argparse.Namespace:
    """The options; on a CPU a toy is the default."""
    made = world_options(parser(__doc__, seconds=300))
    made.add_argument("--parts", nargs="+", choices=["calls", "train"], default=["calls", "train"])
    made.add_argument("--runs", nargs="+", choices=list(TRAINED), default=list(TRAINED))
    made.add_argument("overrides", nargs="*", help="key=value of the runs' configuration")
    return made.parse_args()


def main() -> None:
    """The calls of both, then the runs."""
    options = parse()
    with recording("colocated", options) as record:
        worlds = worlds_of(options)
        setting = setting_of(random_policy(options.models, options.shape), worlds)
        starts = {"in process": partial(ours, setting, "vllm"), "server": partial(served, setting)}
        for name, start in starts.items() if "calls" in options.parts else ():
            with record.attempt(calls=name), closing(side(start)) as sampler:
                for world in worlds:
                    for number in range(1 + options.rounds):
                        record.note("calls", of=name, timed=number > 0, spread=world.spread, **sampler.run(world))
        policy = random_policy(options.models, options.shape, reads=True)
        for name in options.runs if "train" in options.parts else ():
            overrides = [*TRAINED[name], f"train.steps={1 + options.rounds}", *options.overrides]
            train(record, name.replace(", ", "-").replace(" ", "-"), policy, overrides, ENVIRONMENT)


if __name__ == "__main__":
    main()
