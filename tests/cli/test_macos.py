"""Commands that look at clusters run on macOS: here on Linux, without the names that macOS does not have."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.test_top_cluster import MASTER, NOTEBOOKS, T4
from tests.fakes.api_server import FakeApiServer, in_thread

AS_ON_MACOS = """
import fcntl, os, signal, socket, sys, types
import zoneinfo  # asks how this Python was built
sys.platform = "darwin"
settings = sys.modules["_scproxy"] = types.ModuleType("_scproxy")
settings._get_proxy_settings = settings._get_proxies = dict
ONLY_ON_LINUX = {
    os: "O_PATH O_TMPFILE copy_file_range eventfd getrandom getresuid getxattr listxattr memfd_create "
        "pidfd_open pipe2 posix_fadvise posix_fallocate sched_getaffinity sched_setaffinity setns "
        "setresuid setxattr splice unshare",
    signal: "SIGPWR SIGRTMIN SIGRTMAX pidfd_send_signal sigtimedwait sigwaitinfo",
    socket: "AF_NETLINK AF_VSOCK SOCK_CLOEXEC SOCK_NONBLOCK SO_BINDTODEVICE SO_DOMAIN SO_PASSCRED "
        "SO_PEERCRED",
    fcntl: "F_ADD_SEALS F_GET_SEALS F_SETPIPE_SZ F_OFD_SETLK F_OFD_SETLKW",
}
for module, names in ONLY_ON_LINUX.items():
    for name in names.split():
        vars(module).pop(name, None)
from fenka import native
native.DIRECTORY = native.DIRECTORY.with_name("absent")
from fenka.__main__ import main
sys.argv[0] = "fenka"
main()
"""


def fenka(folder: Path, *words: str) -> "subprocess.CompletedProcess[str]":
    """Run a command as on macOS, with an empty home directory."""
    return subprocess.run(
        [sys.executable, "-P", "-c", AS_ON_MACOS, *words],
        env={"HOME": str(folder), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize(
    "words",
    [
        ("top", "node", "-s"),
        ("inspect", "-d"),
        ("list",),
        ("ps", "--cluster"),
        ("queue", "--cluster"),
        ("why", "tf-notebook-7cf4575d78-9gxzd", "--cluster"),
        ("nodes",),
    ],
    ids=" ".join,
)
def test_command_looks_at_a_cluster_as_on_macos(tmp_path: Path, words: tuple[str, ...]) -> None:
    """No traceback, whatever the cluster answers; screens of nodes show the card."""
    server = FakeApiServer.of(nodes=[T4, MASTER], pods=NOTEBOOKS)
    with in_thread(server, tmp_path) as kubeconfig:
        done = fenka(tmp_path, *words, "--kubeconfig", str(kubeconfig))
    assert "Traceback" not in done.stderr
    if words[0] in ("top", "inspect"):
        assert (done.returncode, done.stderr) == (0, "")
        assert T4["metadata"]["name"] in done.stdout


@pytest.mark.parametrize(
    "words",
    [
        ("run", "--gpu-mem", "4", "--", "true"),
        ("notebook", "--local", "--gpu-mem", "4"),
        ("daemon", "--simulate", "T4"),
        ("demo", "--check"),
    ],
    ids=" ".join,
)
def test_command_that_starts_programs_says_that_libraries_are_missing(
    tmp_path: Path, words: tuple[str, ...]
) -> None:
    """One sentence names the wheel that has them."""
    done = fenka(tmp_path, *words)
    assert done.returncode != 0
    assert "Traceback" not in done.stderr
    line = done.stderr.splitlines()[-1]
    assert "this fenka has no native libraries, so it can look at clusters" in line
    assert "Install fenka's wheel for Linux" in line
