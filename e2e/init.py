"""Run as the first process of a machine: make its file system, then reap orphaned processes.

It runs in new namespaces (see supervisor.py) and uses only the standard library. The machine's root is a
copy-on-write view of this machine's root. What a pod writes to "its host" is kept in memory and lost with the
node.
"""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

# Folders that are kept while the machine is switched off, as on a disk.
ON_DISK = (
    "var/lib/kubelet",
    "var/lib/containerd",
    "var/lib/cni",
    "var/lib/fenka",
    "var/log/pods",
    "var/log/containers",
    "etc/cni",
    "etc/cdi",
)


def mount(*arguments: str | Path) -> None:
    """Run mount(8), which prints the reason when it fails."""
    subprocess.run(["mount", *map(str, arguments)], check=True)


def bind(source: Path, target: Path) -> None:
    """Bind-mount a directory of this machine."""
    source.mkdir(parents=True, exist_ok=True)
    target.mkdir(parents=True, exist_ok=True)
    mount("--rbind", source, target)


def make_root(config: dict[str, Any]) -> None:
    """Build the root and change into it."""
    # The upper layer is in memory: it must not be inside the lower layer, which is `/`.
    memory = Path(config["memory"])
    mount("-t", "tmpfs", "-o", "mode=755", "machine", memory)
    root, upper, work = memory / "root", memory / "upper", memory / "work"
    for directory in (root, upper, work):
        directory.mkdir()
    mount("-t", "overlay", "-o", f"lowerdir=/,upperdir={upper},workdir={work}", "machine", root)
    mount("-t", "proc", "proc", root / "proc")
    mount("--rbind", "/dev", root / "dev")
    mount("-t", "sysfs", "sysfs", root / "sys")
    mount("-t", "tmpfs", "-o", "mode=755", "cgroups", root / "sys/fs/cgroup")
    for name, options in config["cgroups"].items():
        (root / "sys/fs/cgroup" / name).mkdir()
        mount("-t", "cgroup", "-o", options, "cgroup", root / "sys/fs/cgroup" / name)
    mount("-t", "tmpfs", "-o", "mode=755", "run", root / "run")
    (root / "run/lock").mkdir(mode=0o1777)
    for shared in config["shared"]:
        bind(Path(shared), root / Path(shared).relative_to("/"))
    for directory_name in ON_DISK:
        bind(Path(config["disk"]) / directory_name, root / directory_name)
    os.chdir(root)
    (root / "mnt").mkdir(exist_ok=True)
    subprocess.run(["pivot_root", ".", "mnt"], check=True)
    os.chroot(".")
    os.chdir("/")
    subprocess.run(["umount", "--lazy", "/mnt"], check=True)
    # The kubelet's and the containers' mounts must be able to propagate to each other.
    mount("--make-rshared", "/")


def main() -> None:
    """Set up the machine, report that it is ready, and reap processes until it ends."""
    config = json.loads(Path(sys.argv[1]).read_text())
    socket.sethostname(config["name"])
    make_root(config)
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    Path(config["ready"]).touch()
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
    while True:
        signal.sigwait({signal.SIGCHLD})
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG) != (0, 0):
                pass


if __name__ == "__main__":
    main()
