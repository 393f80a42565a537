"""The system call filter of code in the sandbox (seccomp, classic BPF). Standard library only.

Calls that namespaces already make harmless are refused too, so that kernel bugs behind them are out of reach. A refused
call fails with EPERM: the code gets an ordinary Python error.
"""

import ctypes
import errno
import os
import struct
from collections.abc import Iterator

from condensegrpo.sandbox.linux import PR_SET_NO_NEW_PRIVS, checked, prctl, syscall
from condensegrpo.sandbox.syscalls import AUDIT_ARCH, UNKNOWN, numbers

_NUMBER, _ARCH, _ARGUMENTS = 0, 4, 16  # offsets in struct seccomp_data
_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW, _KILL, _ERRNO, _ASK = 0x7FFF0000, 0x80000000, 0x00050000, 0x7FC00000
_SET_FILTER, _WITH_LISTENER = 1, 8  # SECCOMP_SET_MODE_FILTER, SECCOMP_FILTER_FLAG_NEW_LISTENER
_X32 = 0x40000000  # marks calls of the x32 ABI, which have other numbers
_NAMESPACES = 0x7E020000  # every CLONE_NEW… flag of clone(2)
_CLONE_THREAD, _CLONE_FILES = 0x00010000, 0x00000400
_SIGNAL_OWNERS = (8, 10, 15)  # F_SETOWN, F_SETSIG, F_SETOWN_EX: signals to other processes through a file descriptor
_WATCHES = (1024, 1026)  # F_SETLEASE, F_NOTIFY: signals when others use a file
_TERMINAL = (0x5412, 0x541C)  # TIOCSTI, TIOCLINUX: typing into a terminal
_TERMINALS, _AFTER = 0x5400, 0x5500  # ioctl(2) of descriptors and terminals; the others can write to a file system
_PDEATHSIG, _SECCOMP, _RECENT = 1, 22, 62  # options of prctl(2); recent ones see other processes or fill memory
_SHARED, _ANONYMOUS, _HUGETLB = 0x01, 0x20, 0x40000  # MAP_…
_ADVICE = (12, 21)  # MADV_MERGEABLE, MADV_PAGEOUT: pages shared with others, or swapped out
_OF_PROCESS, _PER_THREAD = 0x80000000, 4  # in a clock: that of a process or thread by its number; of a thread
_CREATE = 0x400040  # O_CREAT, and the bit of O_TMPFILE
_NOT_STREAM = 0x0E  # in the type of a socket; a stream pair can send to its other end only

DENIED = (
    *("ptrace", "process_vm_readv", "process_vm_writev", "kcmp", "pidfd_open", "pidfd_getfd", "pidfd_send_signal"),
    *("mount", "umount2", "pivot_root", "chroot", "open_tree", "open_tree_attr", "move_mount", "fsopen", "fsconfig"),
    *("fsmount", "fspick", "mount_setattr", "unshare", "setns", "open_by_handle_at", "name_to_handle_at"),
    *("keyctl", "add_key", "request_key", "bpf", "perf_event_open", "userfaultfd", "io_uring_setup"),
    *("io_uring_enter", "io_uring_register", "kexec_load", "kexec_file_load", "init_module", "finit_module"),
    *("delete_module", "reboot", "swapon", "swapoff", "sethostname", "setdomainname", "acct", "quotactl"),
    *("quotactl_fd", "fanotify_init", "iopl", "ioperm", "settimeofday", "clock_settime", "clock_adjtime", "adjtimex"),
    *("syslog", "vhangup", "personality", "modify_ldt", "process_madvise", "process_mrelease", "move_pages", "sync"),
    *("migrate_pages", "sched_setaffinity", "sched_setscheduler", "sched_setparam", "sched_setattr", "setpriority"),
    *("syncfs", "ioprio_set", "inotify_init", "inotify_init1", "inotify_add_watch", "statmount", "listmount"),
    *("socket", "bind", "connect", "sendmsg", "sendmmsg", "shmget", "msgget", "semget", "mq_open", "memfd_create"),
    *("memfd_secret", "vmsplice", "io_setup", "mbind", "set_mempolicy_home_node", "setsockopt"),
)  # the last two lines: channels to other processes, and memory outside of every limit
DENIED_ALONE = (
    *("fork", "vfork", "execve", "execveat", "chmod", "fchmod", "fchmodat", "fchmodat2", "chown", "fchown", "lchown"),
    *("fchownat", "removexattr", "lremovexattr", "fremovexattr", "removexattrat", "file_setattr", "utime", "utimes"),
    *("futimesat", "utimensat", "writev", "pwritev", "pwritev2", "sendfile", "splice", "tee", "copy_file_range"),
    *("ioprio_get", "get_robust_list"),
)  # without namespaces other files and processes of the user are visible; Landlock does not cover these calls
MISSING = ("clone3", "landlock_create_ruleset", "seccomp")  # ENOSYS: programs do without. The last two fill memory
UNSUPPORTED = ("setxattr", "lsetxattr", "fsetxattr", "setxattrat")  # EOPNOTSUPP: no limit counts access control lists
UNSUPPORTED_ALONE = (
    *("fallocate", "openat2", "getxattr", "lgetxattr", "fgetxattr", "getxattrat", "file_getattr"),
    *("listxattr", "llistxattr", "flistxattr", "listxattrat"),
)  # EOPNOTSUPP: Python and the C library then do without. They would evade ``count_writes`` or show attributes of files
ENTRIES = (  # make or move a name in a folder
    *("creat", "mkdir", "mkdirat", "mknod", "mknodat", "symlink", "symlinkat", "link", "linkat"),
    *("rename", "renameat", "renameat2"),
)
WRITES = ("write", "pwrite64")
SIGNALS = ("kill", "tkill", "tgkill", "rt_sigqueueinfo", "rt_tgsigqueueinfo")
QUERIES = (  # of a process by its number; 0 is the caller
    *("getpgid", "getsid", "sched_getparam", "sched_getscheduler", "sched_getattr", "sched_getaffinity"),
    "sched_rr_get_interval",
)
CLOCKS = ("clock_gettime", "clock_getres", "clock_nanosleep", "timer_create")


def confine_syscalls(*, alone: bool, pinned: int = 0) -> None:
    """Apply the filter to this process and its children, irrevocably.

    Args:
        alone: without namespaces: allow threads, no new processes or programs, and signals to this process only.
        pinned: the first file descriptors that stay what they are; alone, only they are written to uncounted.
    """
    _apply(_program(alone=alone, pinned=pinned), 0)


def count_writes(pinned: int) -> int:
    """Let a supervisor decide about every call that can take space on disk.

    Args:
        pinned: the first file descriptors, which are no files; what is written to them is not counted. They stay what
            they are: ``confine`` refuses to close or replace them, and to execute a program, which could close them.

    Returns:
        The file descriptor from which the supervisor receives the calls (``DiskBudget``).

    Raises:
        OSError: the kernel does not allow it, for example because a container has such a filter already.
    """
    calls = numbers()
    lines = [_line(_LOAD, _NUMBER)]
    for name in filter(calls.__contains__, ENTRIES):
        lines += [_line(_EQUAL, calls[name], no=1), _line(_RETURN, _ASK)]
    for name, flags in (("open", 1), ("openat", 2)):
        if name in calls:
            lines += _when_argument(calls[name], flags, [_line(_ANY_BIT, _CREATE, no=1), _line(_RETURN, _ASK)])
    for name in WRITES:
        lines += _when_argument(calls[name], 0, [_line(_AT_LEAST, pinned, no=1), _line(_RETURN, _ASK)])
    return _apply(b"".join([*lines, _line(_RETURN, _ALLOW)]), _WITH_LISTENER)


def _apply(program: bytes, flags: int) -> int:
    array = ctypes.create_string_buffer(program, len(program))
    # struct sock_fprog: unsigned short len, padding, pointer
    header = ctypes.create_string_buffer(struct.pack("HxxxxxxP", len(program) // 8, ctypes.addressof(array)))
    checked("PR_SET_NO_NEW_PRIVS", prctl(PR_SET_NO_NEW_PRIVS, 1))
    return checked("seccomp", syscall(numbers()["seccomp"], _SET_FILTER, ctypes.c_ulong(flags), ctypes.byref(header)))


def _program(*, alone: bool, pinned: int) -> bytes:
    calls = numbers()
    lines = [
        _line(_LOAD, _ARCH),
        _line(_EQUAL, AUDIT_ARCH[os.uname().machine], yes=1),
        _line(_RETURN, _KILL),
        _line(_LOAD, _NUMBER),
        _line(_AT_LEAST, _X32, no=1),
        _line(_RETURN, _KILL),
        _line(_AT_LEAST, UNKNOWN, no=1),
        _refuse(errno.ENOSYS),
    ]
    refused = dict.fromkeys((*DENIED, *(DENIED_ALONE if alone else ())), errno.EPERM)
    refused |= dict.fromkeys(MISSING, errno.ENOSYS)
    refused |= dict.fromkeys((*UNSUPPORTED, *(UNSUPPORTED_ALONE if alone else ())), errno.EOPNOTSUPP)
    for name in filter(calls.__contains__, refused):
        lines += [_line(_EQUAL, calls[name], no=1), _refuse(refused[name])]
    for name, argument, then in (*_rules(alone=alone), *(_rules_alone(pinned) if alone else ())):
        if name in calls:
            lines += _when_argument(calls[name], argument, then)
    return b"".join([*lines, _line(_RETURN, _ALLOW)])


def _rules(*, alone: bool) -> Iterator[tuple[str, int, list[bytes]]]:
    """Calls that are refused for some values of an argument: name, argument, and the lines that look at it."""
    yield "clone", 0, [_line(_ANY_BIT, _NAMESPACES, no=1), _refuse()]
    yield "prlimit64", 0, [_line(_EQUAL, 0, yes=1), _refuse()]  # others' limits
    yield "prctl", 0, [_line(_AT_LEAST, _RECENT, no=1), _refuse(errno.EINVAL)]
    yield "socketpair", 1, [_line(_ANY_BIT, _NOT_STREAM, no=1), _refuse()]
    for name, argument, values in (
        ("prctl", 0, (_PDEATHSIG, _SECCOMP)),
        ("fcntl", 1, (*_SIGNAL_OWNERS, *_WATCHES)),
        ("ioctl", 1, _TERMINAL),
        ("madvise", 2, _ADVICE),
    ):
        for value in values:
            yield name, argument, [_line(_EQUAL, value, no=1), _refuse()]
    yield "mmap", 3, [_line(_ANY_BIT, _HUGETLB, no=1), _refuse()]  # in nobody's resident memory
    # shared memory that no file backs is in nobody's resident memory once the process that filled it has ended
    unless_file = [] if alone else [_line(_ANY_BIT, _ANONYMOUS, no=1)]
    yield "mmap", 3, [_line(_ANY_BIT, _SHARED, no=1 + len(unless_file)), *unless_file, _refuse()]


def _rules_alone(pinned: int) -> Iterator[tuple[str, int, list[bytes]]]:
    for flag in (_CLONE_THREAD, _CLONE_FILES):
        yield "clone", 0, [_line(_ANY_BIT, flag, yes=1), _refuse()]
    yield "ioctl", 1, [_line(_AT_LEAST, _TERMINALS, yes=1), _refuse(errno.ENOTTY)]
    yield "ioctl", 1, [_line(_AT_LEAST, _AFTER, no=1), _refuse(errno.ENOTTY)]
    process = os.getpid()
    for name in SIGNALS:  # tkill names a thread: only the first one of this process has this number
        yield name, 0, [_line(_EQUAL, process, yes=1), _refuse()]
    for name, argument in (*((name, 0) for name in QUERIES), ("getpriority", 1)):
        yield name, argument, [_line(_EQUAL, 0, yes=2), _line(_EQUAL, process, yes=1), _refuse()]
    yield "getpriority", 0, [_line(_EQUAL, 0, yes=1), _refuse()]  # of a process, not of groups or users
    for name in CLOCKS:  # the kernel shows the clocks of threads to their own process only
        yield name, 0, [_line(_AT_LEAST, _OF_PROCESS, no=2), _line(_ANY_BIT, _PER_THREAD, yes=1), _refuse()]
    yield "close", 0, [_line(_AT_LEAST, pinned, yes=1), _refuse(0)]  # seems to succeed
    for name, argument in (("close_range", 0), ("dup2", 1), ("dup3", 1)):
        yield name, argument, [_line(_AT_LEAST, pinned, yes=1), _refuse()]


def _when_argument(call: int, argument: int, then: list[bytes]) -> list[bytes]:
    """Lines that look at the low half of a call's argument; the number is loaded again after them."""
    body = [_line(_LOAD, _ARGUMENTS + 8 * argument), *then, _line(_LOAD, _NUMBER)]
    return [_line(_EQUAL, call, no=len(body)), *body]


def _refuse(number: int = errno.EPERM) -> bytes:
    return _line(_RETURN, _ERRNO | number)


def _line(code: int, value: int, *, yes: int = 0, no: int = 0) -> bytes:
    """struct sock_filter: code, jumps if true and if false, value."""
    return struct.pack("HBBI", code, yes, no, value)
