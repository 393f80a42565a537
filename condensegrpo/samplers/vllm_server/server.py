"""The code inside the processes of a vLLM server: its program, the check of its token, and methods of its workers.

    python -m condensegrpo.samplers.vllm_server.server [--watched FOLDER] FLAGS      vLLM's own server and flags
    --middleware condensegrpo.samplers.vllm_server.server.RequireToken               for every route but /health
    --worker-extension-cls condensegrpo.samplers.vllm_server.server.ServedWeights    for /collective_rpc

Its processes end together, with ``--watched`` also when standard input closes, see ``core/process_guard.py``.

vLLM loads the classes by name, and the process of its engine runs this file again, before it imports vLLM. The file
imports the standard library only: the processes are guarded before the seconds that torch and vLLM take, and
``condensegrpo serve`` reads the name of the token's variable. ``process.py`` starts a server, and needs
both.
"""

import hmac
import json
import os
import sys
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from condensegrpo.core.process import postpone_collections, resume_collections
from condensegrpo.core.process_guard import run_supervised

if TYPE_CHECKING:
    from transformers import PretrainedConfig

TOKEN_VARIABLE = "VLLM_API_KEY"  # vLLM's own variable; a command line would be visible to every user of the machine
OPEN = ("/health", "/ping")
# Workers inherit it: vLLM tells each engine of a dense model that it is alone.
ENGINES_VARIABLE = "CONDENSEGRPO_ENGINES"
SHAPE_KEYS = ("model_type", "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")

Event = dict[str, Any]  # a message or scope of ASGI
Receive = Callable[[], Awaitable[Event]]
Send = Callable[[Event], Awaitable[None]]
Application = Callable[[Event, Receive, Send], Awaitable[None]]


def main() -> None:
    """Serve until a signal ends the process."""
    watched, left = None, None
    if "--watched" in sys.argv:
        index = sys.argv.index("--watched")
        watched = sys.argv[index + 1]
        del sys.argv[index : index + 2]
    else:
        memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None  # short: a socket's path has at most 107 bytes
        left = tempfile.mkdtemp(prefix="condensegrpo-server-", dir=memory)
    os.environ.setdefault("VLLM_RPC_BASE_PATH", watched or left or "")  # its sockets, which a killed engine leaves
    run_supervised(_serve, watched=watched, left=left)


def _serve() -> None:
    os.environ[ENGINES_VARIABLE] = engines_of(sys.argv)
    postpone_collections()
    if "--model" in sys.argv:
        from condensegrpo.core.errors import SamplerError
        from condensegrpo.samplers.vllm.weights import ExpectedWeights

        try:
            expected = ExpectedWeights(sys.argv[sys.argv.index("--model") + 1])
            expected.check_head_size()  # imports vLLM, which takes seconds
            if expected.unused_media:
                sys.argv[1:1] = ["--limit-mm-per-prompt", json.dumps(expected.unused_media)]
        except SamplerError as error:
            sys.exit(f"error: {error}")
    from vllm.entrypoints.launchers.api_server.entry import main as serve

    resume_collections()
    serve()


def engines_of(arguments: list[str]) -> str:
    """The data-parallel engines of a server with this command line."""
    for index, argument in enumerate(arguments):
        flag, equals, value = argument.partition("=")
        if flag.replace("_", "-") in ("--data-parallel-size", "-dp"):
            return value if equals else arguments[index + 1]
    return "1"


class RequireToken:
    """ASGI middleware: 401 for every request without ``Authorization: Bearer <token>``."""

    def __init__(self, app: Application) -> None:
        token = os.environ.get(TOKEN_VARIABLE, "")
        if not token:
            raise ValueError(f"guarding a vLLM server: {TOKEN_VARIABLE} is empty, wanted the token of the server")
        self._app = app
        self._expected = f"Bearer {token}".encode()

    async def __call__(self, scope: Event, receive: Receive, send: Send) -> None:
        """Forward a request with the token, and refuse any other."""
        authorization = next((value for name, value in scope.get("headers", ()) if name == b"authorization"), b"")
        free = scope["type"] == "lifespan" or scope.get("path") in OPEN
        if free or hmac.compare_digest(authorization, self._expected):
            await self._app(scope, receive, send)
            return
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
            return
        body = b'{"error": {"message": "the token is missing or wrong", "code": 401}}'
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
        await send({"type": "http.response.start", "status": 401, "headers": headers})
        await send({"type": "http.response.body", "body": body})


def shape_of(config: "PretrainedConfig") -> dict[str, str]:
    """The settings that identify a model, from a transformers configuration; learner and server compare them."""
    known = config.get_text_config().to_dict()
    return {key: str(known.get(key)) for key in SHAPE_KEYS}


class ServedWeights:
    """Methods of every worker of a server. Their names are prefixed to differ from vLLM's own."""

    vllm_config: Any  # vLLM's, untyped
    model_runner: Any  # likewise
    reload_weights: Callable[..., None]  # vLLM's own

    def condensegrpo_describe(self) -> dict[str, object]:
        """The model and the settings of the server."""
        model = self.vllm_config.model_config
        return {
            "shape": shape_of(model.hf_config),
            "logprobs_mode": str(model.logprobs_mode),
            "max_model_len": int(model.max_model_len),
            "world_size": int(self.vllm_config.parallel_config.world_size),
            "engines": int(os.environ.get(ENGINES_VARIABLE, "1")),
            "lora_rank": getattr(self.vllm_config.lora_config, "max_lora_rank", 0),
            "nccl": self.vllm_config.weight_transfer_config is not None,
        }

    def condensegrpo_load(self, folder: str) -> None:
        """Load all weights of a checkpoint from the safetensors files of a folder."""
        files = [str(file) for file in sorted(Path(folder).glob("*.safetensors"))]
        if not files:
            raise FileNotFoundError(
                f"loading weights from {folder}: this server sees no safetensors file there. Learner and servers must "
                f"share the folder: set sampler.options.server.weights to one that both see."
            )
        from vllm.model_executor.model_loader.weight_utils import safetensors_weights_iterator

        from condensegrpo.samplers.vllm.weights import repack_heads

        self.reload_weights(weights_iterator=safetensors_weights_iterator(files, use_tqdm_on_load=False))
        repack_heads(self.model_runner.get_model())


if __name__ == "__main__":
    main()
elif __name__ == "__mp_main__":  # the process of the engine, or of a worker
    postpone_collections()
    import vllm.v1.engine.core  # noqa: F401  what the process will run: imported before collections resume

    resume_collections()
