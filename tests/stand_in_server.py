"""A scripted server with vLLM's routes, for behaviour that a real server cannot show within a test."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from condensegrpo.core.background_loop import BackgroundLoop

TOKEN = "a token"
TRANSFER = (
    "/shutdown_weight_transfer_engine",
    "/init_weight_transfer_engine",
    "/start_weight_update",
    "/update_weights",
    "/finish_weight_update",
)


@dataclass
class StandIn:
    """The behaviour of a server and the requests it received. May be changed while it serves."""

    shape: dict[str, str]
    label: str = "default"
    healthy: bool = True
    statuses: list[int] = field(default_factory=list)  # of the next replies; then 200
    seconds: float = 0.0  # duration of a reply
    max_model_len: int = 64
    loaded: list[str] = field(default_factory=list)  # folders
    resets: int = 0  # of the prefix cache
    prompts: list[tuple[int, ...]] = field(default_factory=list)
    url: str = ""
    nccl: bool = False
    engines: int = 1
    ranks: list[str | None] = field(default_factory=list)  # engines that requests named
    lora_rank: int = 0
    adapters: list[str] = field(default_factory=list)  # folders
    models: list[str | None] = field(default_factory=list)  # that requests named
    transfers: list[tuple[str, Any]] = field(default_factory=list)  # steps of weights that come over NCCL
    placeholder: int = -1  # of pictures; their tokens are three of it
    pictures: set[str] = field(default_factory=set)  # that it knows by their hashes
    shown: list[list[tuple[str, int]]] = field(default_factory=list)  # of a request: hashes, and sizes of what was sent

    async def health(self, request: web.Request) -> web.Response:
        return web.Response(status=200 if self.healthy else 503)

    async def rpc(self, request: web.Request) -> web.Response:
        asked = await request.json()
        if asked["method"] == "condensegrpo_load":
            self.loaded += asked["args"]
            return web.json_response({"results": [None]})
        found = {
            "shape": self.shape,
            "logprobs_mode": "processed_logprobs",
            "max_model_len": self.max_model_len,
            "world_size": 1,
            "engines": self.engines,
            "lora_rank": self.lora_rank,
            "nccl": self.nccl,
        }
        return web.json_response({"results": [found]})

    async def load_adapter(self, request: web.Request) -> web.Response:
        self.adapters.append((await request.json())["lora_path"])
        return web.Response(text="Success")

    async def weight_info(self, request: web.Request) -> web.Response:
        return web.json_response({"weight_version": self.label})

    async def name_weights(self, request: web.Request) -> web.Response:
        self.label = (await request.json())["new_version"]
        return web.json_response({"success": True})

    async def reset(self, request: web.Request) -> web.Response:
        self.resets += 1
        return web.json_response({"success": True})

    async def transfer(self, request: web.Request) -> web.Response:
        body = await request.json() if request.can_read_body else None
        self.transfers.append((request.path, body))
        return web.json_response({"message": "done"})

    async def generate(self, request: web.Request) -> web.Response:
        asked = await request.json()
        self.prompts.append(tuple(asked["token_ids"]))
        self.models.append(asked.get("model"))
        self.ranks.append(request.headers.get("X-data-parallel-rank"))
        await asyncio.sleep(self.seconds)
        parts = asked.get("content_parts", [])
        self.shown.append([(part["uuid"], len(part["url"] or "")) for part in parts])
        if any(part["url"] is None and part["uuid"] not in self.pictures for part in parts):
            return web.json_response({"error": {"message": "Cache miss for image at index 0"}}, status=400)
        self.pictures.update(part["uuid"] for part in parts)
        status = self.statuses.pop(0) if self.statuses else 200
        if status != 200:
            return web.json_response({"error": {"message": "a scripted failure"}}, status=status)
        choice = {
            "token_ids": [7, 2],
            "logprobs": {"content": [{"logprob": -0.5}, {"logprob": -0.25}]},
            "finish_reason": "stop",
            "weight_versions": [{"version": self.label, "start": 0, "end": 2}],
        }
        expanded = [token for token in asked["token_ids"] for _ in range(3 if token == self.placeholder else 1)]
        return web.json_response({"choices": [choice], "prompt_token_ids": expanded})


@web.middleware
async def _guarded(request: web.Request, handler: Any) -> web.StreamResponse:
    if request.path != "/health" and request.headers.get("Authorization") != f"Bearer {TOKEN}":
        return web.json_response({"error": {"message": "no"}}, status=401)
    answer: web.StreamResponse = await handler(request)
    return answer


@contextmanager
def serving(server: StandIn, *, port: int = 0) -> Iterator[StandIn]:
    """Serve on the loopback interface; ``server.url`` says where."""
    loop = BackgroundLoop("stand-in")
    app = web.Application(middlewares=[_guarded])
    app.add_routes(
        [
            web.get("/health", server.health),
            web.post("/collective_rpc", server.rpc),
            web.post("/v1/load_lora_adapter", server.load_adapter),
            web.get("/weight_info", server.weight_info),
            web.post("/update_weight_version", server.name_weights),
            web.post("/reset_prefix_cache", server.reset),
            web.post("/inference/v1/generate", server.generate),
            *(web.post(step, server.transfer) for step in TRANSFER),
        ]
    )
    runner = web.AppRunner(app, shutdown_timeout=0.1)

    async def start() -> None:
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", port).start()

    loop.run(start())
    server.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    try:
        yield server
    finally:
        loop.run(runner.cleanup())
        loop.close()
