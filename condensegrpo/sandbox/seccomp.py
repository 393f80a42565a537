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

# the same on every machine since Linux 5.0
_NEW = {
    "pidfd_send_signal": 424, "io_uring_setup": 425, "io_uring_enter": 426, "io_uring_register": 427, "open_tree": 428,
    "move_mount": 429, "fsopen": 430, "fsconfig": 431, "fsmount": 432, "fspick": 433, "pidfd_open": 434, "clone3": 435,
    "close_range": 436, "openat2": 437, "pidfd_getfd": 438, "process_madvise": 440, "mount_setattr": 442,
    "quotactl_fd": 443, "landlock_create_ruleset": 444, "memfd_secret": 447, "process_mrelease": 448,
    "set_mempolicy_home_node": 450, "fchmodat2": 452, "statmount": 457, "listmount": 458, "setxattrat": 463,
    "getxattrat": 464, "listxattrat": 465, "removexattrat": 466, "open_tree_attr": 467, "file_getattr": 468,
    "file_setattr": 469,
}  # fmt: skip
UNKNOWN = 470  # this call and later ones are not listed here
_X86_64 = {
    "ptrace": 101, "process_vm_readv": 310, "process_vm_writev": 311, "mount": 165, "umount2": 166, "pivot_root": 155,
    "chroot": 161, "unshare": 272, "setns": 308, "keyctl": 250, "add_key": 248, "request_key": 249, "bpf": 321,
    "perf_event_open": 298, "userfaultfd": 323, "kexec_load": 246, "kexec_file_load": 320, "init_module": 175,
    "finit_module": 313, "delete_module": 176, "reboot": 169, "swapon": 167, "swapoff": 168, "sethostname": 170,
    "setdomainname": 171, "socket": 41, "shmget": 29, "msgget": 68, "semget": 64, "mq_open": 240,
    "open_by_handle_at": 304, "name_to_handle_at": 303, "acct": 163, "quotactl": 179, "memfd_create": 319,
    "kcmp": 312, "fanotify_init": 300, "iopl": 172, "ioperm": 173, "settimeofday": 164, "clock_settime": 227,
    "clock_adjtime": 305, "adjtimex": 159, "syslog": 103, "move_pages": 279, "migrate_pages": 256,
    "sched_setaffinity": 203, "sched_setscheduler": 144, "sched_setparam": 142, "sched_setattr": 314,
    "setpriority": 141, "ioprio_set": 251, "vhangup": 153, "personality": 135, "modify_ldt": 154, "clone": 56,
    "fork": 57, "vfork": 58, "kill": 62, "tkill": 200, "tgkill": 234, "rt_sigqueueinfo": 129,
    "rt_tgsigqueueinfo": 297, "chmod": 90, "fchmod": 91, "fchmodat": 268, "chown": 92, "fchown": 93, "lchown": 94,
    "fchownat": 260, "setxattr": 188, "lsetxattr": 189, "fsetxattr": 190, "removexattr": 197, "lremovexattr": 198,
    "fremovexattr": 199, "utime": 132, "utimes": 235, "futimesat": 261, "utimensat": 280, "truncate": 76,
    "prlimit64": 302, "fcntl": 72, "ioctl": 16, "prctl": 157, "seccomp": 317, "inotify_init": 253,
    "inotify_init1": 294, "inotify_add_watch": 254, "bind": 49, "connect": 42, "sendmsg": 46, "sendmmsg": 307,
    "socketpair": 53, "write": 1, "pwrite64": 18, "writev": 20, "pwritev": 296, "pwritev2": 328, "sendfile": 40,
    "splice": 275, "tee": 276, "vmsplice": 278, "copy_file_range": 326, "fallocate": 285, "io_setup": 206, "mmap": 9,
    "open": 2, "creat": 85, "openat": 257, "mkdir": 83, "mkdirat": 258, "mknod": 133, "mknodat": 259, "symlink": 88,
    "symlinkat": 266, "link": 86, "linkat": 265, "rename": 82, "renameat": 264, "renameat2": 316, "dup2": 33,
    "dup3": 292, "close": 3, "getxattr": 191, "lgetxattr": 192, "fgetxattr": 193, "listxattr": 194,
    "llistxattr": 195, "flistxattr": 196, "execve": 59, "execveat": 322, "getpgid": 121, "getsid": 124,
    "getpriority": 140, "sched_getparam": 143, "sched_getscheduler": 145, "sched_getattr": 315,
    "sched_getaffinity": 204, "sched_rr_get_interval": 148, "ioprio_get": 252, "get_robust_list": 274,
    "clock_gettime": 228, "clock_getres": 229, "clock_nanosleep": 230, "timer_create": 222, "mbind": 237,
    "setsockopt": 54, "madvise": 28, "sync": 162, "syncfs": 306,
}  # fmt: skip
_AARCH64 = {
    "ptrace": 117, "process_vm_readv": 270, "process_vm_writev": 271, "mount": 40, "umount2": 39, "pivot_root": 41,
    "chroot": 51, "unshare": 97, "setns": 268, "keyctl": 219, "add_key": 217, "request_key": 218, "bpf": 280,
    "perf_event_open": 241, "userfaultfd": 282, "kexec_load": 104, "kexec_file_load": 294, "init_module": 105,
    "finit_module": 273, "delete_module": 106, "reboot": 142, "swapon": 224, "swapoff": 225, "sethostname": 161,
    "setdomainname": 162, "socket": 198, "shmget": 194, "msgget": 186, "semget": 190, "mq_open": 180,
    "open_by_handle_at": 265, "name_to_handle_at": 264, "acct": 89, "quotactl": 60, "memfd_create": 279, "kcmp": 272,
    "fanotify_init": 262, "settimeofday": 170, "clock_settime": 112, "clock_adjtime": 266, "adjtimex": 171,
    "syslog": 116, "move_pages": 239, "migrate_pages": 238, "sched_setaffinity": 122, "sched_setscheduler": 119,
    "sched_setparam": 118, "sched_setattr": 274, "setpriority": 140, "ioprio_set": 30, "vhangup": 58,
    "personality": 92, "clone": 220, "kill": 129, "tkill": 130, "tgkill": 131, "rt_sigqueueinfo": 138,
    "rt_tgsigqueueinfo": 240, "fchmod": 52, "fchmodat": 53, "fchownat": 54, "fchown": 55, "setxattr": 5,
    "lsetxattr": 6, "fsetxattr": 7, "removexattr": 14, "lremovexattr": 15, "fremovexattr": 16, "utimensat": 88,
    "truncate": 45, "prlimit64": 261, "fcntl": 25, "ioctl": 29, "prctl": 167, "seccomp": 277, "inotify_init1": 26,
    "inotify_add_watch": 27, "bind": 200, "connect": 203, "sendmsg": 211, "sendmmsg": 269, "socketpair": 199,
    "write": 64, "pwrite64": 68, "writev": 66, "pwritev": 70, "pwritev2": 287, "sendfile": 71, "splice": 76, "tee": 77,
    "vmsplice": 75, "copy_file_range": 285, "fallocate": 47, "io_setup": 0, "mmap": 222, "openat": 56, "mkdirat": 34,
    "mknodat": 33, "symlinkat": 36, "linkat": 37, "renameat": 38, "renameat2": 276, "dup3": 24, "close": 57,
    "getxattr": 8, "lgetxattr": 9, "fgetxattr": 10, "listxattr": 11, "llistxattr": 12, "flistxattr": 13,
    "execve": 221, "execveat": 281, "getpgid": 155, "getsid": 156, "getpriority": 141, "sched_getparam": 121,
    "sched_getscheduler": 120, "sched_getattr": 275, "sched_getaffinity": 123, "sched_rr_get_interval": 127,
    "ioprio_get": 31, "get_robust_list": 100, "clock_gettime": 113, "clock_getres": 114, "clock_nanosleep": 115,
    "timer_create": 107, "mbind": 235, "setsockopt": 208, "madvise": 233, "sync": 81, "syncfs": 267,
}  # fmt: skip
AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}  # as seen by a filter; any other value is a foreign ABI
_TABLES = {"x86_64": {**_NEW, **_X86_64}, "aarch64": {**_NEW, **_AARCH64}}


def numbers() -> dict[str, int]:
    """The system calls of this machine by name, without those that it does not have."""
    machine = os.uname().machine
    if machine not in _TABLES:
        raise OSError(f"looking up system calls: the sandbox supports {', '.join(_TABLES)}, this machine is {machine}")
    return _TABLES[machine]


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
            they are: ``confine_syscalls`` refuses to close or replace them, and to execute a program, which could
            close them.

    Returns:
        The file descriptor from which the supervisor receives the calls (``DiskBudget``).
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
