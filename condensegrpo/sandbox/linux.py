"""Linux system calls that Python does not wrap. Runs in the sandbox's server: standard library only."""

import ctypes
import os
import struct

CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWIPC = 0x00020000, 0x04000000, 0x08000000
CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 0x10000000, 0x20000000, 0x40000000
MS_NOSUID, MS_NODEV, MS_BIND, MS_REC, MS_PRIVATE = 2, 4, 4096, 16384, 1 << 18
MNT_DETACH = 2
ATTR_RDONLY, ATTR_NOSUID, ATTR_NODEV, ATTR_NOEXEC = 1, 2, 4, 8
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_CAPBSET_DROP = 1, 4, 24
PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS, PR_CAP_AMBIENT = 36, 38, 47
PR_CAP_AMBIENT_CLEAR_ALL = 4
LAST_CAPABILITY = 63  # more than any kernel has; the first unknown one ends the loop

_MOUNT_SETATTR, _AT_RECURSIVE, _AT_FDCWD = 442, 0x8000, -100
_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
_CAPABILITY_VERSION_3 = 0x20080522
_libc = ctypes.CDLL(None, use_errno=True)


def checked(doing: str, result: int) -> int:
    """The result of a call.

    Raises:
        OSError: it is negative; the message names the call.
    """
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{doing}: {os.strerror(number)}")
    return result


def syscall(number: int, *arguments: int | ctypes.Array[ctypes.c_char] | object) -> int:
    """A system call by number; −1 if it failed, with the reason in ``ctypes.get_errno``."""
    return int(_libc.syscall(ctypes.c_long(number), *arguments))


def unshare(flags: int) -> None:
    """Move to new namespaces of these kinds; CLONE_NEWPID applies to the next child."""
    checked(f"unshare({flags:#x})", _libc.unshare(flags))


def mount(source: str, target: str, kind: str | None, flags: int, data: str = "") -> None:
    """mount(2)."""
    arguments = (os.fsencode(source), os.fsencode(target), kind and kind.encode(), ctypes.c_ulong(flags))
    checked(f"mounting {source} on {target}", _libc.mount(*arguments, data.encode() or None))


def set_attributes(target: str, attributes: int, *, recursive: bool) -> None:
    """Set attributes of a mount, optionally of all mounts below it (mount_setattr, Linux 5.12)."""
    attr = struct.pack("4Q", attributes, 0, 0, 0)  # struct mount_attr: set, clear, propagation, user namespace
    flags = _AT_RECURSIVE if recursive else 0
    path = ctypes.create_string_buffer(os.fsencode(target))
    result = syscall(_MOUNT_SETATTR, ctypes.c_int(_AT_FDCWD), path, ctypes.c_uint(flags), attr, len(attr))
    checked(f"mount_setattr({target})", result)


def become_root(folder: str) -> None:
    """Make a mount the root of this mount namespace and detach the old root."""
    os.chdir(folder)
    dot = ctypes.create_string_buffer(b".")
    checked("pivot_root", syscall(_PIVOT_ROOT[os.uname().machine], dot, dot))
    checked("umount2", _libc.umount2(b".", MNT_DETACH))
    os.chdir("/")


def prctl(option: int, *arguments: int | object) -> int:
    """prctl(2); −1 if it failed."""
    padded = [ctypes.c_ulong(value) if isinstance(value, int) else value for value in arguments]
    return int(_libc.prctl(option, *padded, *[ctypes.c_ulong(0)] * (4 - len(padded))))


def drop_capabilities() -> None:
    """Drop every capability, also for programs that are executed later."""
    for capability in range(LAST_CAPABILITY + 1):
        if prctl(PR_CAPBSET_DROP, capability) < 0:
            break  # no further capability exists, or none can be dropped because none is held
    prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL)
    header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION_3, 0)
    checked("capset", _libc.capset(header, (ctypes.c_uint32 * 6)()))
