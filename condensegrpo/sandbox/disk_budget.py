"""What a call may still put on disk where no file system of its own limits it. Standard library only.

    job          write(7, …, 8192)  ──▶  supervisor: 8192 bytes are left  ──▶  the kernel goes on with the call
                 open("x", O_CREAT) ──▶  supervisor: no entry is left     ──▶  ENOSPC

The kernel stops the job at every call that can take space (``seccomp.count_writes``) until the supervisor has decided.
Only numbers in registers count, which the job cannot change meanwhile. Space that is given back does not count.
"""

import errno
import fcntl
import struct

from condensegrpo.sandbox.limits import SandboxLimits
from condensegrpo.sandbox.seccomp import WRITES
from condensegrpo.sandbox.syscalls import numbers

BLOCKS = 8192  # bytes that a call can take besides its own: a write begins and ends in a block, a name needs one too
_RECEIVE, _SEND, _CONTINUE = 0xC0502100, 0xC0182101, 1  # SECCOMP_IOCTL_NOTIF_…, SECCOMP_USER_NOTIF_FLAG_CONTINUE
_CALL = struct.Struct("=Q8xi12x6Q")  # struct seccomp_notif: id, number of the call, its arguments
_ANSWER = struct.Struct("=QqiI")  # struct seccomp_notif_resp: id, result, −errno, flags


class DiskBudget:
    """Bytes and entries that a job may still take."""

    def __init__(self, listener: int, limits: SandboxLimits) -> None:
        self.listener = listener  # file descriptor; readable while a call waits for its answer
        self._bytes = limits.disk_bytes
        self._entries = limits.files
        self._writes = {numbers()[name] for name in WRITES}

    def answer(self) -> None:
        """Let a waiting call go on if it fits what is left, else let it fail with ENOSPC."""
        message = bytearray(_CALL.size)
        try:
            fcntl.ioctl(self.listener, _RECEIVE, message)
            identity, call, _, _, size, *_ = _CALL.unpack(message)
            writes = call in self._writes
            space = BLOCKS + (size if writes else 0)
            fits = space <= self._bytes and (writes or self._entries > 0)
            if fits:
                self._bytes -= space
                self._entries -= not writes
            fcntl.ioctl(
                self.listener, _SEND, _ANSWER.pack(identity, 0, *((0, _CONTINUE) if fits else (-errno.ENOSPC, 0)))
            )
        except FileNotFoundError:
            pass  # a signal interrupted the call, which asks again, or the job has ended
