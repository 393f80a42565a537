"""Middleware of a vLLM server that requires the token on every route but ``/health``.

vLLM's own check of its API key covers ``/v1`` and ``/inference`` only, not the routes that change weights and run
methods by name. Standard library only; vLLM loads this by name (``--middleware``).
"""

import hmac
import os
from collections.abc import Awaitable, Callable
from typing import Any

TOKEN_VARIABLE = "VLLM_API_KEY"  # vLLM's own variable; a command line would be visible to every user of the machine
OPEN = ("/health", "/ping")

Event = dict[str, Any]  # a message or scope of ASGI
Receive = Callable[[], Awaitable[Event]]
Send = Callable[[Event], Awaitable[None]]
Application = Callable[[Event, Receive, Send], Awaitable[None]]


class RequireToken:
    """ASGI middleware: 401 for every request without ``Authorization: Bearer <token>``."""

    def __init__(self, app: Application) -> None:
        token = os.environ.get(TOKEN_VARIABLE, "")
        if not token:
            raise ValueError(f"guarding a vLLM server: {TOKEN_VARIABLE} is empty, wanted the token of the server")
        self._app = app
        self._wanted = f"Bearer {token}".encode()

    async def __call__(self, scope: Event, receive: Receive, send: Send) -> None:
        """Forward a request with the token, and refuse any other."""
        given = next((value for name, value in scope.get("headers", ()) if name == b"authorization"), b"")
        if scope["type"] == "lifespan" or scope.get("path") in OPEN or hmac.compare_digest(given, self._wanted):
            await self._app(scope, receive, send)
            return
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
            return
        body = b'{"error": {"message": "the token is missing or wrong", "code": 401}}'
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
        await send({"type": "http.response.start", "status": 401, "headers": headers})
        await send({"type": "http.response.body", "body": body})
