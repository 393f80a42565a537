"""The system call filter of code in the sandbox (seccomp, classic BPF). Standard library only.

Calls that namespaces already make harmless are refused too, so that kernel bugs behind them are out of reach. A refused
call fails with EPERM: the code gets an ordinary Python error.
"""

import ctypes
import errno
import os
import struct

from condensegrpo.sandbox.linux import PR_SET_NO_NEW_PRIVS, PR_SET_SECCOMP, SECCOMP_MODE_FILTER, checked, prctl
from condensegrpo.sandbox.syscalls import AUDIT_ARCH, numbers

_NUMBER, _ARCH, _ARGUMENTS = 0, 4, 16  # offsets in struct seccomp_data
_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW, _KILL, _ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
_X32 = 0x40000000  # marks calls of the x32 ABI, which have other numbers
_NAMESPACES = 0x7E020000  # every CLONE_NEW… flag of clone(2)
_CLONE_THREAD = 0x00010000
_SIGNAL_OWNERS = (8, 10, 15)  # F_SETOWN, F_SETSIG, F_SETOWN_EX: signals to other processes through a file descriptor
_TERMINAL = (0x5412, 0x541C)  # TIOCSTI, TIOCLINUX: typing into a terminal
_PDEATHSIG = 1

DENIED = (
    *("ptrace", "process_vm_readv", "process_vm_writev", "kcmp", "pidfd_open", "pidfd_getfd", "pidfd_send_signal"),
    *("mount", "umount2", "pivot_root", "chroot", "open_tree", "open_tree_attr", "move_mount", "fsopen", "fsconfig"),
    *("fsmount", "fspick", "mount_setattr", "unshare", "setns", "open_by_handle_at", "name_to_handle_at"),
    *("keyctl", "add_key", "request_key", "bpf", "perf_event_open", "userfaultfd", "io_uring_setup"),
    *("io_uring_enter", "io_uring_register", "kexec_load", "kexec_file_load", "init_module", "finit_module"),
    *("delete_module", "reboot", "swapon", "swapoff", "sethostname", "setdomainname", "acct", "quotactl"),
    *("quotactl_fd", "fanotify_init", "iopl", "ioperm", "settimeofday", "clock_settime", "clock_adjtime", "adjtimex"),
    *("syslog", "vhangup", "personality", "modify_ldt", "process_madvise", "process_mrelease", "move_pages"),
    *("migrate_pages", "sched_setaffinity", "sched_setscheduler", "sched_setparam", "sched_setattr", "setpriority"),
    *("ioprio_set", "socket", "shmget", "msgget", "semget", "mq_open", "memfd_create", "memfd_secret"),
)  # the last line: channels between calls, and memory outside of every limit
DENIED_ALONE = (
    *("fork", "vfork", "chmod", "fchmod", "fchmodat", "fchmodat2", "chown", "fchown", "lchown", "fchownat"),
    *("setxattr", "lsetxattr", "fsetxattr", "setxattrat", "removexattr", "lremovexattr", "fremovexattr"),
    *("removexattrat", "file_setattr", "utime", "utimes", "futimesat", "utimensat"),
)  # without namespaces other files and processes of the user are visible; Landlock does not cover these calls
SIGNALS = ("kill", "tkill", "tgkill", "rt_sigqueueinfo", "rt_tgsigqueueinfo")


def confine(*, alone: bool) -> None:
    """Apply the filter to this process and its children, irrevocably.

    Args:
        alone: without namespaces: allow threads, no new processes, and signals to this process only.
    """
    program = _program(alone=alone)
    array = ctypes.create_string_buffer(program, len(program))
    # struct sock_fprog: unsigned short len, padding, pointer
    header = ctypes.create_string_buffer(struct.pack("HxxxxxxP", len(program) // 8, ctypes.addressof(array)))
    checked("PR_SET_NO_NEW_PRIVS", prctl(PR_SET_NO_NEW_PRIVS, 1))
    checked("PR_SET_SECCOMP", prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.byref(header)))


def _program(*, alone: bool) -> bytes:
    calls = numbers()
    clone, arch = calls["clone"], AUDIT_ARCH[os.uname().machine]
    lines = [
        _line(_LOAD, _ARCH),
        _line(_EQUAL, arch, yes=1),
        _line(_RETURN, _KILL),
        _line(_LOAD, _NUMBER),
        _line(_AT_LEAST, _X32, no=1),
        _line(_RETURN, _KILL),
    ]
    for name in (*DENIED, *(DENIED_ALONE if alone else ())):
        if name in calls:
            lines += [_line(_EQUAL, calls[name], no=1), _refuse()]
    lines += [_line(_EQUAL, calls["clone3"], no=1), _refuse(errno.ENOSYS)]  # the C library then uses clone
    lines += _when_argument(clone, 0, [_line(_ANY_BIT, _NAMESPACES, no=1), _refuse()])
    lines += _when_argument(calls["prlimit64"], 0, [_line(_EQUAL, 0, yes=1), _refuse()])  # others' limits
    lines += _when_argument(calls["prctl"], 0, [_line(_EQUAL, _PDEATHSIG, no=1), _refuse()])
    for name, values in (("fcntl", _SIGNAL_OWNERS), ("ioctl", _TERMINAL)):
        for value in values:
            lines += _when_argument(calls[name], 1, [_line(_EQUAL, value, no=1), _refuse()])
    if alone:
        lines += _when_argument(clone, 0, [_line(_ANY_BIT, _CLONE_THREAD, yes=1), _refuse()])
        own = os.getpid()
        for name in SIGNALS:  # tkill names a thread: only the first one of this process has this number
            lines += _when_argument(calls[name], 0, [_line(_EQUAL, own, yes=1), _refuse()])
    return b"".join([*lines, _line(_RETURN, _ALLOW)])


def _when_argument(call: int, argument: int, then: list[bytes]) -> list[bytes]:
    """Lines that look at the low half of a call's argument; the number is loaded again after them."""
    body = [_line(_LOAD, _ARGUMENTS + 8 * argument), *then, _line(_LOAD, _NUMBER)]
    return [_line(_EQUAL, call, no=len(body)), *body]


def _refuse(number: int = errno.EPERM) -> bytes:
    return _line(_RETURN, _ERRNO | number)


def _line(code: int, value: int, *, yes: int = 0, no: int = 0) -> bytes:
    """struct sock_filter: code, jumps if true and if false, value."""
    return struct.pack("HBBI", code, yes, no, value)
