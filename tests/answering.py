"""An endpoint in a thread that behaves, or misbehaves, as it is told: `from answering import Behaviour, endpoint`."""

import atexit
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


def completion(text: object, finish: str = "stop") -> bytes:
    return json.dumps(
        {"choices": [{"message": {"role": "assistant", "content": text}, "finish_reason": finish}]}
    ).encode()


@dataclass
class Behaviour:
    """What the endpoint does."""

    body: bytes = field(default_factory=lambda: completion("facts: a=1"))
    status: int = 200
    statuses: list[int] = field(default_factory=list)  # of the next answers; then ``status``
    answer: Callable[[Any], bytes] | None = None  # the body, by the request; None: ``body``
    seconds: float = 0.0  # before it answers
    meeting: threading.Barrier | None = None  # of requests that are answered when all of them have come
    trickle: float = 0.0  # seconds between the bytes of an answer
    asked: list[Any] = field(default_factory=list)
    keys: list[str | None] = field(default_factory=list)
    at_once: int = 0
    most_at_once: int = 0


@contextmanager
def endpoint(behaviour: Behaviour) -> Iterator[str]:
    lock, over = threading.Lock(), threading.Event()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            with lock:
                behaviour.at_once += 1
                behaviour.most_at_once = max(behaviour.most_at_once, behaviour.at_once)
                asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                behaviour.asked.append({"path": self.path, **asked})
                behaviour.keys.append(self.headers.get("Authorization"))
                status = behaviour.statuses.pop(0) if behaviour.statuses else behaviour.status
            body = behaviour.body if behaviour.answer is None else behaviour.answer(asked)
            if behaviour.meeting is not None:
                behaviour.meeting.wait(60)
            over.wait(behaviour.seconds)
            with lock:
                behaviour.at_once -= 1
            try:
                self.send_response(status)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                for place in range(len(body)) if behaviour.trickle else ():
                    self.wfile.write(body[place : place + 1])
                    over.wait(behaviour.trickle)
                if not behaviour.trickle:
                    self.wfile.write(body)
            except OSError:
                pass  # whoever asked has gone

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002  the base class names it so
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}/v1"
    finally:
        over.set()
        server.shutdown()
        server.server_close()
        thread.join()


@cache
def always(text: str) -> str:
    """The URL of an endpoint that always answers this, as long as the process runs."""
    stack = ExitStack()
    atexit.register(stack.close)
    return stack.enter_context(endpoint(Behaviour(body=completion(text))))
