"""Linux system calls that Python does not wrap, Landlock (Linux 6.2) among them. Standard library only."""

import ctypes
import os
import stat
import struct
from collections.abc import Sequence

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
    """The result of a call; OSError with its name if it is negative."""
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


_CREATE, _ADD_RULE, _RESTRICT = 444, 445, 446
_VERSION_FLAG, _PATH_BENEATH = 1, 1
LEAST_ABI = 3  # earlier versions cannot forbid truncating files
_EXECUTE, _WRITE, _READ, _READ_DIR = 1, 2, 4, 8
_OF_FILES = _EXECUTE | _WRITE | _READ | 1 << 14  # with TRUNCATE
_RIGHTS = {3: 15, 4: 15, 5: 16}  # number of file rights in an ABI; later versions as 5
_NO_DEVICES = 1 << 6 | 1 << 11  # MAKE_CHAR, MAKE_BLOCK
_NETWORK = 3  # bind and connect of TCP, from ABI 4
_SCOPES = 3  # abstract sockets and signals, from ABI 6


def confine_files(readable: Sequence[str], writable: Sequence[str]) -> None:
    """Allow this process to read and execute below some paths, everything below others, and to open nothing else."""
    version = max(0, syscall(_CREATE, None, 0, _VERSION_FLAG))  # 0: Landlock is missing or disabled
    if version < LEAST_ABI:
        raise OSError(f"Landlock has version {version} here, the sandbox needs {LEAST_ABI} (Linux 6.2) or later")
    every = (1 << _RIGHTS.get(version, _RIGHTS[5])) - 1
    # struct landlock_ruleset_attr: files, from ABI 4 network, from ABI 6 scopes
    fields = [every, *([_NETWORK] if version >= 4 else []), *([_SCOPES] if version >= 6 else [])]
    attributes = ctypes.create_string_buffer(struct.pack(f"{len(fields)}Q", *fields), 8 * len(fields))
    rules = checked("landlock_create_ruleset", syscall(_CREATE, attributes, ctypes.c_size_t(8 * len(fields)), 0))
    try:
        for path in readable:
            _allow(rules, path, _EXECUTE | _READ | _READ_DIR)
        for path in writable:
            _allow(rules, path, every & ~_NO_DEVICES)
        checked("PR_SET_NO_NEW_PRIVS", prctl(PR_SET_NO_NEW_PRIVS, 1))
        checked("landlock_restrict_self", syscall(_RESTRICT, rules, 0))
    finally:
        os.close(rules)


def _allow(rules: int, path: str, rights: int) -> None:
    descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        if not stat.S_ISDIR(os.fstat(descriptor).st_mode):
            rights &= _OF_FILES
        # struct landlock_path_beneath_attr, packed: u64 rights, s32 file descriptor
        rule = ctypes.create_string_buffer(struct.pack("=Qi", rights, descriptor), 12)
        checked(f"landlock_add_rule({path})", syscall(_ADD_RULE, rules, _PATH_BENEATH, rule, 0))
    finally:
        os.close(descriptor)
