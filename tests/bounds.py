"""Programs that each try to get one thing without bound. Standard library only: also run by another Python, as nobody.

A program prints how much it got: bytes, processes, names, or successful attempts. As a program of its own:
``python bounds.py ISOLATION`` prints the table's word for each, as JSON.
"""

import asyncio
import json
import os
import socket
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from condensegrpo.sandbox.calls import MIB, CallResult, SandboxLimits
from condensegrpo.sandbox.sandbox import Sandbox
from condensegrpo.sandbox.seccomp import numbers

LIMITS = SandboxLimits(seconds=10, memory_mib=256, processes=8, disk_mib=4, files=200)
ENDED = ("timeout", "memory", "processes", "disk", "killed")
PRELUDE = """
import ctypes, errno, fcntl, mmap, os, resource, signal, socket, struct, threading, time
libc = ctypes.CDLL(None, use_errno=True)
part, goal = bytes(1 << 18), 5 * {disk}
host, link, named, outside, calls = {host!r}, {link!r}, {named!r}, {outside}, {calls!r}
def succeeding(*attempts):
    count = 0
    for attempt in attempts:
        try: count += attempt() != -1
        except OSError: pass
    return count
def got(step, goal=goal):
    total = 0
    try:
        while total < goal: total += step(total)
    except (OSError, MemoryError, RuntimeError): pass
    return total
def write(name, data=part):
    file = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    try: return os.write(file, data)
    finally: os.close(file)
"""


@dataclass(frozen=True)
class Attempt:
    """A program, and how much it may print where its row says ``capped``."""

    code: str
    limit: int = 0
    seconds: float = LIMITS.seconds  # long enough for a busy machine


ATTEMPTS = {
    "bytes in files": Attempt(
        "print(got(lambda n: write(str(n // (1 << 20))))); time.sleep(0.3)", LIMITS.disk_bytes
    ),
    "bytes in one file": Attempt("print(got(lambda n: write('x')))", LIMITS.disk_bytes // 2),
    "bytes in a sparse file": Attempt(
        "f = os.open('x', os.O_CREAT | os.O_RDWR)\nprint(succeeding(lambda: os.truncate(f, 1 << 40)))"
    ),
    "bytes in deleted files that are still open": Attempt(
        "def step(n):\n  global f\n  if n % (1 << 20) == 0:\n"
        "    f = os.open('x', os.O_CREAT | os.O_WRONLY); os.unlink('x')\n"
        "  return os.write(f, part)\n"
        "print(got(step)); time.sleep(0.3)",
        LIMITS.disk_bytes,
    ),
    "bytes in folders that cannot be read": Attempt(
        "os.mkdir('d', 0o300)\nprint(got(lambda n: write(f'd/{n}'))); time.sleep(0.3)", LIMITS.disk_bytes
    ),
    "bytes below a path of any length": Attempt(
        "def step(n):\n  os.mkdir('n' * 255); os.chdir('n' * 255); return write('x')\n"
        "print(got(step)); time.sleep(0.3)",
        LIMITS.disk_bytes,
    ),
    "bytes reserved by `fallocate`": Attempt(
        "def step(n):\n  f = os.open(str(n), os.O_CREAT | os.O_RDWR); os.posix_fallocate(f, 0, 1 << 20); os.close(f)\n"
        "  return 1 << 20\nprint(got(step)); time.sleep(0.3)",
        LIMITS.disk_bytes,
    ),
    "bytes by `writev`, `sendfile`, `copy_file_range`, `splice`": Attempt(
        "source = os.open('source', os.O_CREAT | os.O_RDWR); os.write(source, part)\n"
        "def copied(how):\n"
        "  def step(n):\n"
        "    f = os.open(f'{how.__name__}{n // (1 << 20)}', os.O_CREAT | os.O_RDWR)\n"
        "    os.lseek(f, 0, 2); done = how(f); os.close(f); return done\n  return step\n"
        "def vector(f): return os.writev(f, [part])\n"
        "def sent(f): return os.sendfile(f, source, 0, len(part))\n"
        "def ranged(f): return os.copy_file_range(source, f, len(part), 0)\n"
        "r, w = os.pipe()\n"
        "def spliced(f): return os.splice(r, f, os.splice(source, w, 1 << 16, offset_src=0))\n"
        "print(sum(got(copied(how)) for how in (vector, sent, ranged, spliced))); time.sleep(0.3)",
        LIMITS.disk_bytes,
    ),
    "bytes through a memory map of a file": Attempt(
        "def kept(n):\n  f = os.open(str(n), os.O_CREAT | os.O_RDWR); os.truncate(f, 1 << 20)\n"
        "  m = mmap.mmap(f, 1 << 20); m.write(bytes(1 << 20)); os.close(f); return 1 << 20\n"
        "print(got(kept)); time.sleep(0.3)",
        LIMITS.disk_bytes,
    ),
    "files and folders": Attempt(
        f"print(got(lambda n: write(str(n), b'') or 1, 5 * {LIMITS.files})); time.sleep(0.3)", LIMITS.files
    ),
    "hard links": Attempt(
        f"write('x')\nprint(got(lambda n: os.link('x', 'n' * 240 + str(n)) or 1, 5 * {LIMITS.files})); time.sleep(0.3)",
        LIMITS.files,
    ),
    "symbolic links": Attempt(
        f"print(got(lambda n: os.symlink('n' * 4000, str(n)) or 1, 5 * {LIMITS.files})); time.sleep(0.3)", LIMITS.files
    ),
    "memory of one process": Attempt(
        "kept = []\nprint(got(lambda n: kept.append(bytearray(1 << 24)) or 1 << 24, 1 << 30))", LIMITS.memory_bytes
    ),
    "memory of all processes": Attempt(
        "def hold():\n  time.sleep(0.3); x = bytearray(b'x') * (100 << 20); time.sleep(5); os._exit(0)\n"
        "def step(n):\n  if os.fork() == 0: threading.Thread(target=hold).start(); libc.syscall(exit_thread, 0)\n"
        "  return 100 << 20\n"
        "exit_thread = 60 if os.uname().machine == 'x86_64' else 93  # of the first thread only\n"
        "print(got(step, 300 << 20), flush=True); time.sleep(4)"
    ),
    "shared memory of a process that has ended": Attempt(
        "def shared(size):\n  try: return mmap.mmap(-1, size)\n"
        "  except OSError: return mmap.mmap(os.open('/dev/zero', os.O_RDWR), size)\n"
        "def keep(w):\n  m = shared(100 << 20)\n"
        "  if os.fork() == 0:\n    for at in range(0, 100 << 20, 4096): m[at] = 1\n    os._exit(0)\n"
        "  os.wait(); os.write(w, b'x'); time.sleep(5)\n"
        "def step():\n  r, w = os.pipe()\n  if os.fork() == 0:\n"
        "    try: keep(w)\n    finally: os._exit(0)\n"
        "  os.close(w); return os.read(r, 1) == b'x'\n"
        "try: print(sum(step() for _ in range(4)))\nexcept OSError: print(0)"
    ),
    "memory in `memfd`, `/dev/shm`, System V and POSIX queues": Attempt(
        "name = os.path.basename(os.path.dirname(host))\n"
        "print(succeeding(lambda: os.memfd_create('x'), lambda: libc.shmctl(libc.shmget(0, 4096, 0o1600), 0, 0),\n"
        "  lambda: libc.msgctl(libc.msgget(0, 0o1600), 0, 0),\n"
        "  lambda: (libc.mq_open(b'/' + name.encode(), 0o102, 0o600, 0), libc.mq_unlink(b'/' + name.encode()))[0],\n"
        "  lambda: write('/dev/shm/' + name) and os.unlink('/dev/shm/' + name)))"
    ),
    "memory in pipes and socket pairs": Attempt(
        "kept = []\ndef pipe(n):\n  r, w = os.pipe2(os.O_NONBLOCK); kept.append(r); kept.append(w)\n"
        "  try: fcntl.fcntl(w, 1031, 1 << 20)\n  except OSError: pass\n"
        "  return filled(w)\n"
        "def pair(n):\n  ends = socket.socketpair(); kept.extend(ends); ends[0].setblocking(False)\n"
        "  return filled(ends[0].fileno())\n"
        "def filled(end):\n  return got(lambda n: os.write(end, part), 1 << 22)\n"
        "print(max(got(pair, 1 << 30), got(pipe, 1 << 30)))",
        64 * MIB,
    ),
    "memory of the kernel that no limit counts (see below)": Attempt(
        "r, w = os.pipe()\n"
        "libc.prctl(38, 1, 0, 0, 0)  # PR_SET_NO_NEW_PRIVS, for seccomp\n"
        "area = mmap.mmap(-1, 4096, mmap.MAP_PRIVATE)\n"
        "page = ctypes.addressof(ctypes.c_char.from_buffer(area))\n"
        "vector = (ctypes.c_uint64 * 2)(page, 1)\n"
        "allow = (ctypes.c_uint64 * 1)(0x7FFF0000 << 32 | 6)\n"
        "program = (ctypes.c_uint64 * 2)(1, ctypes.addressof(allow))\n"
        "ruleset, context, every = (ctypes.c_uint64 * 1)(1), ctypes.c_uint64(), 0xFFFFFFFF\n"
        "entries = ((1, 7, every), *[(2, 7, os.getuid())] * 1000, (4, 7, every), (16, 7, every), (32, 7, every))\n"
        "acl = struct.pack('I', 2) + b''.join(struct.pack('HHI', *entry) for entry in entries)\n"
        "write('x')\n"
        "print(succeeding(lambda: libc.vmsplice(w, vector, ctypes.c_size_t(1), 0),\n"
        "  lambda: libc.prctl(78, 1, 2, 0, 0),  # PR_FUTEX_HASH\n"
        "  lambda: libc.syscall(calls['mbind'], ctypes.c_void_p(page), 4096, 0, None, 0, 0),\n"
        "  lambda: libc.syscall(calls['io_setup'], 8, ctypes.byref(context)),\n"
        "  lambda: libc.syscall(calls['landlock_create_ruleset'], ruleset, ctypes.c_size_t(8), 0),\n"
        "  lambda: libc.syscall(calls['seccomp'], 1, 8, program), lambda: libc.prctl(22, 2, program, 0, 0),\n"
        "  lambda: os.setxattr('x', 'system.posix_acl_access', acl),\n"
        "  lambda: socket.socketpair()[0].setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)))"
    ),
    "bytes written to stdin": Attempt("print(succeeding(lambda: os.truncate(0, 9), lambda: os.write(0, b'x')))"),
    "wall clock and CPU time": Attempt("while True: pass", seconds=1),
    "programs in place of Python (`execve`)": Attempt(
        "succeeding(lambda: os.execv('/bin/echo', ['echo', '1']))\nprint(0)"
    ),
    "processes": Attempt(
        "def step(n):\n  if os.fork() == 0: time.sleep(5); os._exit(0)\n  return 1\n"
        "print(got(step, 20), flush=True); time.sleep(1); os._exit(0)",
        LIMITS.processes,
    ),
    "threads": Attempt(
        "def step(n):\n  threading.Thread(target=time.sleep, args=(5,), daemon=True).start(); return 1\n"
        "threading.stack_size(1 << 16)\nprint(got(step, 20), flush=True); time.sleep(1); os._exit(0)",
        LIMITS.processes,
    ),
    "timers and queued signals": Attempt(
        "timer = ctypes.c_int()\n"
        "def create():\n  return libc.syscall(calls['timer_create'], 1, None, ctypes.byref(timer))\n"
        "print(succeeding(*[create] * 5000))",
        256,
    ),
    "open files": Attempt("print(got(lambda n: os.dup(1) and 1, 1000))", 64),
    "reading files of the host": Attempt("print(succeeding(lambda: open(host).read(), lambda: os.listdir('/proc')))"),
    "writing files of the host": Attempt(
        "print(succeeding(lambda: open(host, 'a'), lambda: os.utime(host), lambda: os.chmod(host, 0o644)))"
    ),
    "whether a file of the host exists (`stat`, `access`, `readlink`)": Attempt(
        "print(succeeding(lambda: os.stat(host), lambda: -(not os.access(host, os.F_OK)), lambda: os.readlink(link)))"
    ),
    "watching files of the host (`inotify`, `fanotify`, `dnotify`)": Attempt(
        "print(succeeding(lambda: libc.inotify_add_watch(libc.inotify_init(), host.encode(), 0xFFF),\n"
        "  lambda: libc.fanotify_init(0x200, 0), lambda: fcntl.fcntl(os.open('/usr', os.O_RDONLY), 1026, 1)))"
    ),
    "extended attributes of files of the host": Attempt("print(succeeding(lambda: os.listxattr(host)))"),
    "the mounts of the host (`listmount`)": Attempt(
        "class Request(ctypes.Structure):\n  _fields_ = [('size', ctypes.c_uint32), ('spare', ctypes.c_uint32)]\n"
        "  _fields_ += [('mount', ctypes.c_uint64), ('param', ctypes.c_uint64)]\n"
        "request, mounts = Request(24, 0, 2**64 - 1, 0), (ctypes.c_uint64 * 64)()\n"
        "print(succeeding(lambda: open('/proc/mounts').read(),\n"
        "  lambda: libc.syscall(458, ctypes.byref(request), ctypes.byref(mounts), 64, 0)))"
    ),
    "signalling and changing other processes": Attempt(
        "print(succeeding(lambda: os.kill(outside, 0),\n"
        "  lambda: os.sched_setaffinity(outside, os.sched_getaffinity(0))))"
    ),
    "the command, session, priority, scheduling and clocks of other processes": Attempt(
        "clock, answer = ~outside << 3 | 2, ctypes.create_string_buffer(64)\n"
        "print(succeeding(lambda: open(f'/proc/{outside}/cmdline').read(), lambda: os.pidfd_open(outside),\n"
        "  lambda: os.getsid(outside), lambda: os.getpgid(outside), lambda: os.getpriority(0, outside),\n"
        "  lambda: os.getpriority(1, os.getpgid(outside)), lambda: os.sched_getaffinity(outside),\n"
        "  lambda: os.sched_getscheduler(outside), lambda: os.sched_getparam(outside),\n"
        "  lambda: os.sched_rr_get_interval(outside), lambda: libc.clock_gettime(clock, answer),\n"
        "  lambda: libc.clock_getres(clock, answer),\n"
        "  lambda: libc.syscall(calls['timer_create'], clock, None, answer),\n"
        "  lambda: libc.syscall(calls['ioprio_get'], 1, outside),\n"
        "  lambda: libc.syscall(calls['sched_getattr'], outside, answer, 56, 0)))"
    ),
    "whether a process exists (`stat` of `/proc`)": Attempt("print(succeeding(lambda: os.stat(f'/proc/{outside}')))"),
    "sockets of the network": Attempt("print(succeeding(socket.socket))"),
    "named sockets of the host": Attempt(
        "def step():\n  one, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)\n"
        "  return one.sendto(b'x', named)\n"
        "print(succeeding(step))"
    ),
    "descriptors passed to other processes": Attempt(
        "one, other = socket.socketpair()\nprint(succeeding(lambda: socket.send_fds(one, [b'x'], [1])))"
    ),
}  # fmt: skip


async def run_all(isolation: str) -> dict[str, CallResult]:
    """Run the programs, several at a time, with a file, a link and a socket on the host that they may try to use."""
    with tempfile.TemporaryDirectory() as folder, socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as server:
        Path(folder).chmod(0o755)
        host, link, named = (str(Path(folder, name)) for name in ("host-file", "link", "socket"))
        Path(host).write_text("x", encoding="utf-8")
        os.symlink(host, link)
        server.bind(named)
        for path in (host, named):
            Path(path).chmod(0o666)
        values = {"host": host, "link": link, "named": named, "outside": os.getpid(), "calls": numbers()}
        prelude = PRELUDE.format(disk=LIMITS.disk_bytes, **values)
        with Sandbox(isolation=isolation, limits=LIMITS, parallel=8) as sandbox:
            sandbox.open()
            calls = (sandbox.run_python(prelude + each.code, seconds=each.seconds) for each in ATTEMPTS.values())
            results = await asyncio.gather(*calls)
    return dict(zip(ATTEMPTS, results, strict=True))


def observed(name: str, result: CallResult) -> str:
    """The word of the table for a result."""
    if result.outcome in ENDED:
        return "ended"
    amount = int(result.stdout)
    if amount == 0:
        return "refused"
    return "capped" if amount <= ATTEMPTS[name].limit else "not bounded"


if __name__ == "__main__":
    print(json.dumps({name: observed(name, result) for name, result in asyncio.run(run_all(sys.argv[1])).items()}))
