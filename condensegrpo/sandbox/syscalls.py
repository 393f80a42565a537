"""Numbers of the filtered system calls by machine. Standard library only."""

import os

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
    """The system calls of this machine by name, without those that it does not have.

    Raises:
        OSError: the machine is neither x86_64 nor aarch64.
    """
    machine = os.uname().machine
    if machine not in _TABLES:
        raise OSError(f"looking up system calls: the sandbox supports {', '.join(_TABLES)}, this machine is {machine}")
    return _TABLES[machine]
