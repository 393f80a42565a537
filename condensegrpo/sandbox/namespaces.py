"""Isolation by namespaces: one root for all calls, and separate processes, users and folder for each call.

    server   new mount, network, IPC and host-name namespaces; root = a tmpfs with Python bound read-only, no /proc
      └ call   new user, process and mount namespaces, as an ordinary user, with a size-capped tmpfs in /box

The processes of a call see no others; all of them end with the first one, see ``fork_init``. Standard library only.
"""

import os
import signal
from collections.abc import Sequence
from pathlib import Path

from condensegrpo.sandbox import linux
from condensegrpo.sandbox.calls import SandboxLimits

BOX = "/box"  # the folder of a call
NOBODY = 65534
_DEVICES = ("null", "full", "random", "urandom")  # a shared map of zero is memory that belongs to no process


def enter(root: str, readable: Sequence[str]) -> int:
    """Move this process into a root that contains ``readable`` and nothing else.

    Args:
        root: an empty folder to mount it on; it can be removed afterwards.
        readable: files, folders and symbolic links, mounted read-only at the same paths.

    Returns:
        A file descriptor of the host's /proc, for the server only.
    """
    proc = os.open("/proc", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    spaces = linux.CLONE_NEWNS | linux.CLONE_NEWNET | linux.CLONE_NEWIPC | linux.CLONE_NEWUTS
    user, group = os.geteuid(), os.getegid()
    try:
        linux.unshare(spaces)  # as root: calls then run as nobody
    except PermissionError:
        linux.unshare(spaces | linux.CLONE_NEWUSER)
        _map_ids(proc, inside=0, user=user, group=group)
    linux.mount("none", "/", None, linux.MS_REC | linux.MS_PRIVATE)
    linux.mount("tmpfs", root, "tmpfs", linux.MS_NOSUID, "size=1m,mode=0755")
    for path in readable:
        if os.path.islink(path):
            Path(root + path).parent.mkdir(parents=True, exist_ok=True)
            os.symlink(os.readlink(path), root + path)
        else:
            _bind(root, path, linux.ATTR_RDONLY | linux.ATTR_NOSUID | linux.ATTR_NODEV)
    for name in _DEVICES:
        _bind(root, f"/dev/{name}", linux.ATTR_RDONLY | linux.ATTR_NOSUID | linux.ATTR_NOEXEC)
    os.makedirs(root + BOX)
    if not os.path.lexists(f"{root}/tmp"):
        os.symlink(BOX, f"{root}/tmp")
    linux.become_root(root)
    linux.set_attributes("/", linux.ATTR_RDONLY, recursive=False)
    return proc


def enter_call(proc: int) -> None:
    """Move this process into the user and mount namespaces of one call; its next child begins a process namespace."""
    if os.geteuid() == 0:
        as_nobody()
    user, group = os.geteuid(), os.getegid()
    linux.unshare(linux.CLONE_NEWUSER | linux.CLONE_NEWPID | linux.CLONE_NEWNS)
    _map_ids(proc, inside=NOBODY, user=user, group=group)


def fork_init() -> int:
    """Fork the first process of a call's process namespace, which does nothing; all others end with it.

    The kernel keeps signals from the first process that would end the code of a call, such as its own SIGKILL.
    """
    pid = os.fork()
    if pid:
        return pid
    try:
        os.closerange(0, 1 << 20)
        linux.prctl(linux.PR_SET_PDEATHSIG, signal.SIGKILL)
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel removes orphans that end
        while True:
            signal.pause()
    finally:
        os._exit(1)


def open_box(limits: SandboxLimits) -> None:
    """Mount the empty folder of a call, visible in its own mount namespace only."""
    size = f"size={limits.disk_bytes},nr_inodes={limits.files + 1},mode=0700"
    linux.mount("tmpfs", BOX, "tmpfs", linux.MS_NOSUID | linux.MS_NODEV, size)


def as_nobody() -> None:
    """Switch from root to the user nobody, if the user namespace maps that user; else do nothing.

    A user namespace that maps root alone has an ordinary user of the host as its root: no privilege to drop.
    """
    try:
        os.setgroups([])
        os.setresgid(NOBODY, NOBODY, NOBODY)
    except OSError:
        return
    os.setresuid(NOBODY, NOBODY, NOBODY)
    linux.prctl(linux.PR_SET_DUMPABLE, 1)  # else /proc/self belongs to root, and the id maps cannot be written


def _map_ids(proc: int, *, inside: int, user: int, group: int) -> None:
    texts = {"setgroups": "deny", "uid_map": f"{inside} {user} 1", "gid_map": f"{inside} {group} 1"}
    for name, text in texts.items():
        file = os.open(f"self/{name}", os.O_WRONLY, dir_fd=proc)
        try:
            os.write(file, text.encode())
        finally:
            os.close(file)


def _bind(root: str, path: str, attributes: int) -> None:
    target = Path(root + path)
    if Path(path).is_dir():
        target.mkdir(parents=True, exist_ok=True)
    else:
        target.parent.mkdir(parents=True, exist_ok=True)
        target.touch()
    linux.mount(path, str(target), None, linux.MS_BIND | linux.MS_REC)
    linux.set_attributes(str(target), attributes, recursive=True)
