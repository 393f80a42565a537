"""Hostile code that the sandbox must survive. Standard library only: also run by another Python, as nobody.

As a program: ``python hostile.py ISOLATION`` prints the result of each input, as JSON.
"""

import asyncio
import gc
import json
import os
import sys
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from condensegrpo.sandbox.calls import CallResult, SandboxLimits
from condensegrpo.sandbox.sandbox import Sandbox

SECONDS = 0.8
AMPLE_SECONDS = 20.0
LIMITS = SandboxLimits(seconds=SECONDS, memory_mib=256, disk_mib=8, files=500, output_bytes=4000)
SECRET = "hf_thisisasecret"
MARK = "left-by-hostile-code"  # a file's name
SLEEP = "987.25"  # an argument of a process


@dataclass(frozen=True)
class Hostile:
    """One input and its required result."""

    code: str
    outcomes: tuple[str, ...] = ("finished",)  # any of these
    stdout: str | None = None  # exactly; None: anything but ESCAPED
    stderr: str = ""  # contained in it

    @property
    def seconds(self) -> float:
        """The time limit: ample where another limit has to end the input, which takes longer on a busy machine."""
        return SECONDS if "timeout" in self.outcomes else AMPLE_SECONDS


INPUTS = {
    "infinite loop": Hostile("while True: pass", ("timeout",)),
    "sleep with SIGTERM ignored": Hostile(
        "import signal, time\nfor s in range(1, 65):\n  try: signal.signal(s, signal.SIG_IGN)\n"
        "  except Exception: pass\ntime.sleep(60)",
        ("timeout",),
    ),
    "fork bomb": Hostile("import os\nwhile True:\n  try: os.fork()\n  except OSError: pass", ("timeout", "processes")),
    "double-forked daemon that holds stdout": Hostile(
        "import os, time\nif os.fork() == 0:\n  os.setsid()\n  if os.fork() == 0: time.sleep(60)\n  os._exit(0)\n",
        ("finished", "failed"),
    ),
    "1 TB allocation": Hostile("bytearray(1 << 40)", ("failed",), stderr="MemoryError"),
    "small allocations": Hostile("x = []\nwhile True: x.append(bytearray(1 << 20))", ("failed", "memory", "timeout")),
    "memory shared between many": Hostile(
        "import os, time\nfor _ in range(8):\n  if os.fork() == 0: x = bytearray(b'x' * (90 << 20)); time.sleep(60)\n"
        "time.sleep(60)",
        ("memory", "failed"),
    ),
    "memory in anonymous files": Hostile(
        "import os\nkept = []\nwhile True:\n  kept.append(os.memfd_create('x'))\n  os.write(kept[-1], bytes(1 << 20))",
        ("failed",),
        stderr="PermissionError",
    ),
    "thread bomb": Hostile(
        "import threading, time\nthreading.stack_size(32768)\nwhile True:\n"
        "  threading.Thread(target=time.sleep, args=(60,), daemon=True).start()",
        ("failed", "processes", "memory", "timeout"),
    ),
    "disk flood": Hostile(
        "n = 0\nwhile True:\n  with open(str(n), 'wb') as f: f.write(bytes(1 << 20))\n  n += 1",
        ("failed", "disk", "timeout"),
    ),
    "one large file": Hostile("with open('x', 'wb') as f:\n  while True: f.write(bytes(1 << 20))", ("failed",)),
    "sparse file": Hostile("open('x', 'wb').truncate(1 << 40)", ("failed",)),
    "a million small files": Hostile(
        "for n in range(10**6): open(str(n), 'w').close()", ("failed", "disk", "timeout")
    ),
    "endlessly nested folders": Hostile(
        "import os\nwhile True: os.mkdir('d'); os.chdir('d')", ("failed", "disk", "timeout")
    ),
    "output flood": Hostile("while True: print('x' * 1000)", ("timeout",)),
    "flood of stderr": Hostile("import os\nwhile True: os.write(2, b'x' * 65536)", ("timeout",)),
    "bytes that are not UTF-8": Hostile("import os; os.write(1, b'a\\xff\\xfeb')", stdout="a��b"),
    "terminal escapes": Hostile("print('\\x1b[31m\\x07\\x00red\\x9b')", stdout="\\x1b[31m\\x07\\x00red\\x9b\n"),
    "os._exit(0)": Hostile("import os; print('a'); os._exit(0)", stdout="a\n"),
    "sys.exit(0)": Hostile("import sys; sys.exit(0)"),
    "closing every descriptor": Hostile("import os, time\nos.closerange(0, 1000)\ntime.sleep(60)", ("timeout",)),
    "reading stdin": Hostile("input()", ("failed",), stderr="EOFError"),
    "core dump": Hostile("import ctypes; ctypes.string_at(0)", ("killed",)),
    "abort": Hostile("import os; os.abort()", ("killed",)),
    "stopping itself": Hostile("import os, signal; os.kill(os.getpid(), signal.SIGSTOP)", ("killed",)),
    "deep recursion": Hostile("def f(): f()\nf()", ("failed",), stderr="RecursionError"),
    "unlimited recursion": Hostile(
        "import sys\nsys.setrecursionlimit(10**9)\nclass A:\n  def __getattr__(self, name): return repr(self.x)\n"
        "  __repr__ = lambda self: self.y\nrepr(A())",
        ("killed", "failed", "memory", "timeout"),
    ),
    "9**9**9": Hostile("9**9**9", ("timeout", "memory", "failed")),
    "NUL bytes in the source": Hostile("print(1)\0", ("failed",), stderr="null bytes"),
    "a lone surrogate in the source": Hostile("print('\ud800')", ("failed",), stderr="surrogates"),
    "source nested 10,000 deep": Hostile("(" * 10_000 + ")" * 10_000, ("failed", "killed")),
    "empty source": Hostile(""),
    "a symbolic link out of the folder": Hostile(
        "import os\nos.symlink('/etc/passwd', 'x')\nprint('ESCAPED', open('x').read())", ("failed",)
    ),
    "reading files outside": Hostile(
        "for name in ('/etc/passwd', '/etc/hostname', '/proc/self/environ', '/proc/1/environ', '/root/.bashrc'):\n"
        "  try: print('ESCAPED', name, open(name).read())\n  except OSError: pass"
    ),
    "a view of other processes": Hostile(
        "import os\ntry: found = [n for n in os.listdir('/proc') if n.isdigit()]\nexcept OSError: found = []\n"
        "print('ESCAPED' if found else 'none')",
        stdout="none\n",
    ),
    "the environment": Hostile(
        "import ctypes, os\nlibc = ctypes.CDLL(None)\n"
        "libc.getenv.restype = ctypes.c_char_p\n"
        "print(dict(os.environ), libc.getenv(b'HF_TOKEN'), libc.getenv(b'HOME'))",
        stdout="{} None None\n",
    ),
    "descriptors of the parent": Hostile(
        "import os\nfor fd in range(3, 4096):\n  try: print('ESCAPED', fd, os.fstat(fd))\n  except OSError: pass"
    ),
    "changing Python's files": Hostile(
        "import os\nopen(os.__file__, 'a')\nprint('ESCAPED')", ("failed",)
    ),
    "changing rights of Python's files": Hostile("import os\nos.chmod(os.__file__, 0)\nprint('ESCAPED')", ("failed",)),
    "killing parent, group and everything": Hostile(
        "import os, signal\nfor kill, one in ((os.kill, os.getppid()), (os.killpg, 0), (os.kill, -1), (os.kill, 1)):\n"
        "  try: kill(one, signal.SIGKILL)\n  except OSError: pass\nprint('here')",
        ("finished", "killed"),
    ),
    "limits of the parent": Hostile(
        "import os, resource\nfor pid in (os.getppid(), 1):\n  if pid and pid != os.getpid():\n"
        "    try: resource.prlimit(pid, resource.RLIMIT_CPU, (1, 1)); print('ESCAPED')\n    except OSError: pass\n"
        "try: os.sched_setaffinity(os.getppid(), {0}); print('ESCAPED')\nexcept OSError: pass"
    ),
    "DNS": Hostile("import socket; socket.getaddrinfo('example.org', 80); print('ESCAPED')", ("failed",)),
    "TCP to loopback": Hostile(
        "import socket; socket.create_connection(('127.0.0.1', 22)); print('ESCAPED')", ("failed",)
    ),
    "a unix socket": Hostile(
        "import socket; socket.socket(socket.AF_UNIX).bind('\\0x'); print('ESCAPED')",
        ("failed",),
        stderr="not permitted",
    ),
    "fetching a page": Hostile(
        "import urllib.request; urllib.request.urlopen('http://127.0.0.1/'); print('ESCAPED')", ("failed",)
    ),
    "system calls by ctypes": Hostile(
        "import ctypes, os\nlibc = ctypes.CDLL(None)\n"
        "calls = dict(ptrace=libc.ptrace(16, os.getppid(), 0, 0), mount=libc.mount(b'none', b'/box', b'tmpfs', 0, 0),\n"
        "  syncfs=libc.syncfs(1), unshare=libc.unshare(0x10000000), chroot=libc.chroot(b'.'),\n"
        "  setuid=-1 if os.getuid() else libc.setuid(1), read=libc.process_vm_readv(os.getppid(), 0, 0, 0, 0, 1),\n"
        "  key=libc.syscall(248, 0, 0, 0, 0, 0))\n"
        "print([name for name, result in calls.items() if result != -1])",
        stdout="[]\n",
    ),
    "signals through a descriptor": Hostile(
        "import fcntl, os, signal\nr, w = os.pipe()\nfcntl.fcntl(r, 10, signal.SIGKILL)\nprint('ESCAPED')", ("failed",)
    ),
    "pip install": Hostile(
        "import subprocess, sys\n"
        "command = [sys.executable, '-m', 'pip', 'install', 'no-such-package']\n"
        "print(subprocess.run(command, capture_output=True).returncode or 'ESCAPED')",
        ("finished", "failed", "timeout"),
    ),
    "a sitecustomize for the next call": Hostile(
        "for name in ('sitecustomize.py', 'usercustomize.py', 'conftest.py', 'json.py'):\n"
        "  open(name, 'w').write('print(\"ESCAPED\")')\nimport builtins, json\nbuiltins.print = None\njson.dumps = None"
    ),
    "files in shared folders": Hostile(
        f"for folder in ('/tmp', '/var/tmp', '/dev/shm', '/run/lock', '/'):\n"
        f"  try: open(folder + '/{MARK}', 'w').close()\n  except OSError: pass"
    ),
    "a folder without permissions": Hostile(
        "import os\nos.makedirs('a/b')\nos.mkdir('a/c', 0)\nos.umask(0o777)\nos.mkdir('d')\nos.mkdir('a/b/e')"
    ),
    "folders with files that cannot be read": Hostile(
        "import os\nfor name in ('d', 'd/e', 'd/e/f'):\n  os.mkdir(name, 0o300)\n  open(name + '/x', 'w').close()\n"
        "os.mkfifo('d/p')\nos.symlink('/', 'd/e/s')"
    ),
    "files below a path of any length": Hostile(
        "import os\nfor n in range(50):\n  os.mkdir('n' * 255, 0o300)\n  os.chdir('n' * 255)\n  open('x', 'w').close()"
    ),
    "a link out of the folder, written to": Hostile(
        f"import os\nos.symlink('/var/tmp', 'x')\nopen('x/{MARK}', 'w').close()", ("failed",)
    ),
    "a program that was started and detached": Hostile(
        f"import subprocess\nsubprocess.Popen(['sleep', '{SLEEP}'], start_new_session=True, stdout=-3, stderr=-3)",
        ("finished", "failed"),
    ),
    "endless exit handlers": Hostile(
        "import atexit, time\natexit.register(time.sleep, 60)", ("timeout",)
    ),
    "a thread that runs on": Hostile(
        "import threading, time\nthreading.Thread(target=time.sleep, args=(60,)).start()", ("timeout",)
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Run:
    """The results of all inputs in one isolation backend."""

    results: dict[str, CallResult]
    left: list[str]  # processes, files and descriptors that remained at the end
    after: CallResult  # of a harmless call at the end


async def run_all(isolation: str) -> Run:
    """Run the inputs, several at a time."""
    with Sandbox(isolation=isolation, limits=LIMITS, parallel=6) as sandbox:
        sandbox.open()
        before = descriptors()
        calls = (sandbox.run_python(case.code, seconds=case.seconds) for case in INPUTS.values())
        results = await asyncio.gather(*calls)
        after = await sandbox.run_python("print(1)", seconds=30)
        left = await _left(sandbox.running().folder)
        more = descriptors() - before
        left += [f"{more} descriptors"] if more else []
    return Run(dict(zip(INPUTS, results, strict=True)), left, after)


def descriptors() -> int:
    """How many files this process has open; what was left to the garbage collector is closed."""
    gc.collect()
    return len(os.listdir("/proc/self/fd"))


async def _left(folder: str) -> list[str]:
    """What the calls left behind; their processes get a moment to end, and their folders to be removed."""
    end = time.monotonic() + 30
    while (_processes(folder) or _folders(folder)) and time.monotonic() < end:
        await asyncio.sleep(0.02)
    shared = ("/tmp", "/var/tmp", "/dev/shm", "/run/lock", "/")
    files = [f"{place}/{MARK}" for place in shared if Path(place, MARK).exists()]
    return _processes(folder) + files + _folders(folder)


def _folders(folder: str) -> list[str]:
    return [str(path) for path in (Path(folder).iterdir() if Path(folder).exists() else ())]


def _processes(folder: str) -> list[str]:
    """Processes of the sandbox besides its server, and the program that hostile code starts."""
    processes = []
    for entry in filter(lambda entry: entry.name.isdigit(), Path("/proc").iterdir()):
        try:
            line = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
        except OSError:
            continue  # it has ended
        if folder in line or f"sleep {SLEEP}" in line:
            processes.append(f"process {entry.name}: {line}")
    return processes if len(processes) > 1 else []  # a single one is the server


def encoded(isolation: str) -> str:
    return json.dumps(asdict(asyncio.run(run_all(isolation))))


def decoded(text: str) -> Run:
    data = json.loads(text)
    results = {name: replace(CallResult(**result), records=()) for name, result in data["results"].items()}
    return Run(results, data["left"], replace(CallResult(**data["after"]), records=()))


if __name__ == "__main__":
    os.environ["HF_TOKEN"] = SECRET
    print(encoded(sys.argv[1]))
