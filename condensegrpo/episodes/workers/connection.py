"""One end of a stream socket on an event loop: messages out without waiting, and messages in, one at a time.

A message is a frame: eight bytes of length, then its pickle. Frames that are sent in one round of the event loop leave
in one call of the system.
"""

import asyncio
import pickle
import select
import socket
import struct
from collections.abc import Callable, Iterator
from contextlib import suppress

from condensegrpo.episodes.workers.messages import Message

LENGTH = struct.Struct(">Q")
READ_BYTES = 1 << 20


class Connection:
    """Sends and receives messages while it is attached to an event loop."""

    def __init__(self, end: socket.socket) -> None:
        """Take over one end of a socket."""
        end.setblocking(False)
        self._end = end
        self._incoming, self._outgoing = bytearray(), bytearray()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._flushing = False  # in this round of the event loop

    def attach(
        self,
        on_message: Callable[[Message], None],
        *,
        on_unreadable: Callable[[Exception], None],
        on_end: Callable[[], None],
    ) -> None:
        """Receive on the running event loop.

        Args:
            on_unreadable: a message cannot be unpickled, such as one with a class that only the other end can import.
            on_end: the other end was closed; called once, after the last message.
        """
        loop = self._loop = asyncio.get_running_loop()

        def receive() -> None:
            try:
                data = self._end.recv(READ_BYTES)
            except BlockingIOError:
                return
            except OSError:
                data = b""
            self._incoming += data
            for frame in self._frames():
                try:
                    message = pickle.loads(frame)
                except Exception as error:
                    on_unreadable(error)
                else:
                    on_message(message)
            if not data:
                self.detach()
                on_end()

        loop.add_reader(self._end, receive)

    def detach(self) -> None:
        """Leave the event loop, and send what can be sent at once."""
        loop, self._loop = self._loop, None
        if loop is not None:
            self._send_some()
            loop.remove_reader(self._end)
            loop.remove_writer(self._end)

    def send(self, message: Message) -> None:
        """Send a message, in the order of the calls; one that arrives nowhere is dropped.

        Raises:
            Exception: the message cannot be pickled; nothing of it is sent.
        """
        data = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
        self._outgoing += LENGTH.pack(len(data))
        self._outgoing += data
        if self._loop is None:
            self._send_some()
        elif not self._flushing:
            self._flushing = True
            self._loop.call_soon(self._flush)

    def close(self) -> None:
        """Close this end."""
        self.detach()
        self._end.close()

    def ended(self, seconds: float) -> bool:
        """Whether the other end is closed, now or within some seconds."""
        poll = select.poll()
        poll.register(self._end, select.POLLRDHUP)
        return bool(poll.poll(seconds * 1000))

    def _flush(self) -> None:
        self._flushing = False
        if self._loop is not None and self._send_some():
            self._loop.add_writer(self._end, self._continue)

    def _continue(self) -> None:
        if not self._send_some() and self._loop is not None:
            self._loop.remove_writer(self._end)

    def _send_some(self) -> bool:
        """Send what the system takes; whether something is left."""
        try:
            with suppress(BlockingIOError):
                while self._outgoing:
                    del self._outgoing[: self._end.send(self._outgoing)]
        except OSError:  # the other end was closed, which ``attach`` reports
            self._outgoing.clear()
        return bool(self._outgoing)

    def _frames(self) -> Iterator[bytes]:
        """The complete frames that have arrived."""
        while len(self._incoming) >= LENGTH.size:
            end = LENGTH.size + LENGTH.unpack_from(self._incoming)[0]
            if len(self._incoming) < end:
                return
            frame = bytes(memoryview(self._incoming)[LENGTH.size : end])
            del self._incoming[:end]
            yield frame
