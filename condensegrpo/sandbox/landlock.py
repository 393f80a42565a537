"""Isolation by Landlock: restricts which files code may open, without privileges (Linux 6.2). Standard library only."""

import ctypes
import os
import stat
import struct
from collections.abc import Sequence

from condensegrpo.sandbox.linux import PR_SET_NO_NEW_PRIVS, checked, prctl, syscall

_CREATE, _ADD_RULE, _RESTRICT = 444, 445, 446
_VERSION_FLAG, _PATH_BENEATH = 1, 1
LEAST_ABI = 3  # earlier versions cannot forbid truncating files
_EXECUTE, _WRITE, _READ, _READ_DIR = 1, 2, 4, 8
_OF_FILES = _EXECUTE | _WRITE | _READ | 1 << 14  # with TRUNCATE
_RIGHTS = {3: 15, 4: 15, 5: 16}  # number of file rights in an ABI; later versions as 5
_NO_DEVICES = 1 << 6 | 1 << 11  # MAKE_CHAR, MAKE_BLOCK
_NETWORK = 3  # bind and connect of TCP, from ABI 4
_SCOPES = 3  # abstract sockets and signals, from ABI 6


def abi() -> int:
    """The version of Landlock in this kernel; 0: missing or disabled."""
    return max(0, syscall(_CREATE, None, 0, _VERSION_FLAG))


def confine_files(readable: Sequence[str], writable: Sequence[str]) -> None:
    """Allow this process to read and execute below some paths, everything below others, and to open nothing else.

    Raises:
        OSError: the kernel's Landlock is missing or too old.
    """
    version = abi()
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
