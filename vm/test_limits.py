"""Limits of programs, and to whom processes belong, where control groups are those of cgroup v2."""

import re
import shlex

import pytest

from tests.deploy import foreign_directory
from vm.conftest import MACHINE
from vm.guest import Guest
from vm.test_package import jobs

SLICES_MIB = {"alice": 6462, "bob": 5385}
"""Of 6 and 5 GiB of a T4."""

FILL = """\
import ctypes, time
driver = ctypes.CDLL("libcuda.so.1")
driver.cuInit(0)
context = ctypes.c_void_p()
driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0)
driver.cuCtxSetCurrent(context)
held = 0
while not (code := driver.cuMemAlloc_v2(ctypes.byref(ctypes.c_void_p()), ctypes.c_size_t(64 << 20))):
    held += 64
print(f"{held} MiB, then {code}", flush=True)
time.sleep(30000)
"""
POD = "12345678-9abc-4def-8123-456789abcdef"
CONTAINER = "0123456789abcdef" * 4
SLICE = f"kubepods-besteffort-pod{POD.replace('-', '_')}.slice"
OWNER = (
    "/usr/lib/fenka/bin/python3 -I -c 'import sys; "
    "from fenka.node.lease.pod_processes import pod_and_container, living_pods; "
    "print(*pod_and_container(int(sys.argv[1])), *living_pods())' $pid"
)


def test_machine_has_cgroup_v2_alone(guest: Guest) -> None:
    """In namespaces the rest of the machine may use v1."""
    assert guest.run("stat --file-system --format %T /sys/fs/cgroup") == "cgroup2fs\n"
    if MACHINE == "qemu":
        assert guest.run("cat /proc/self/cgroup").startswith("0::/user.slice/user-0.slice/")
        assert "memory" in guest.run("cat /sys/fs/cgroup/cgroup.controllers").split()


def test_programs_of_two_users_get_no_memory_beyond_their_slices(guest: Guest) -> None:
    """Each is refused at its own limit, and what it holds is counted as its user's."""
    for user, mib in SLICES_MIB.items():
        guest.run(
            f"fenka run --gpu-mem {mib // 1077} -d --name fill -- python3 -c {shlex.quote(FILL)}",
            user,
        )
    for user, mib in SLICES_MIB.items():
        held = mib // 64 * 64
        printed = guest.until("fenka logs fill", lambda text: "then" in text and text, user)
        assert printed == f"{held} MiB, then 2\n"
        job = jobs(guest)[f"{user}/fill"]
        assert [(found["memory_mib"], found["used_mib"]) for found in job["slices"]] == [
            (mib, held)
        ]
        for pid in job["pids"]:
            groups = guest.run(f"cat /proc/{pid}/cgroup")
            uid = guest.run(f"id -u {user}").strip()
            assert re.search(rf"^0::/user\.slice/user-{uid}\.slice/", groups, re.MULTILINE)
            assert groups.count("\n") == 1 or MACHINE == "namespaces"
    assert set(jobs(guest)) == {"alice/fill", "bob/fill"}


@pytest.mark.parametrize("reader", ["", "unshare --cgroup "])
def test_process_belongs_to_the_pod_that_systemd_driver_puts_it_in(
    guest: Guest, reader: str
) -> None:
    """For a program on the host, and for one in a container with a cgroup namespace of its own."""
    guest.run(
        f"systemd-run --quiet --scope --slice={SLICE} --unit=cri-containerd-{CONTAINER}.scope "
        "sleep 30000 >/dev/null 2>&1 &"
    )
    pid = guest.until("pgrep -x sleep", str.strip)
    other = "kubepods-besteffort-pod00000000_0000_4000_8000_000000000000.slice"
    script = f"pid={pid}; {OWNER}"
    shown = guest.run(
        f"systemd-run --quiet --scope --slice={other} {reader}sh -c {shlex.quote(script)}"
    )
    pod, container, *living = shown.split()
    assert (pod, container) == (POD, CONTAINER)
    assert POD in living


def test_directory_of_another_user_changes_nothing(guest: Guest) -> None:
    """Its files have the names of modules, libraries and programs that fenka uses."""
    guest.run(foreign_directory.MAKE, "bob")
    shown = guest.run(foreign_directory.USE, "alice")
    assert f"{4 * 1077} MiB\n" in shown
    assert "first: stopped" in shown
    assert shown.endswith("\nno foreign code ran\njson\n")
