"""The process group of the ranks, which each process leaves: NCCL warns of one that has not. The ranks' machines."""

import shutil
import subprocess
import sys

import leaving
import pytest
from command import succeed

from condensegrpo.learner.ranks import machine


def test_a_single_process_leaves_its_group_when_it_ends() -> None:
    for program in (leaving.learner, leaving.sampler):
        assert succeed(program=program).splitlines() == ["joined: True", "at the end: False"]


def test_a_container_is_a_machine_of_its_own_whatever_its_host_is_called() -> None:
    """Weights were written once for all ranks of one host name, into a /dev/shm that other containers do not see."""
    inside = ["unshare", "--user", "--map-root-user", "--mount"]
    mount = ["mount", "-t", "tmpfs", "none", "/dev/shm"]
    if shutil.which("unshare") is None or subprocess.run([*inside, *mount], check=False).returncode != 0:
        pytest.skip("needs user namespaces")
    says = "from condensegrpo.learner.ranks import machine; print(machine())"
    program = f"{says}; import subprocess; subprocess.run({mount}, check=True); print(machine())"
    outside, container = subprocess.check_output([*inside, sys.executable, "-c", program], text=True).splitlines()
    assert outside == machine() != container
    renamed = ["unshare", "--user", "--map-root-user", "--uts", "bash", "-c", 'hostname other && exec "$@"', "-"]
    shared = subprocess.check_output([*renamed, sys.executable, "-c", says], text=True).strip()
    assert shared != machine()  # one /dev/shm, as with docker run --ipc=host
