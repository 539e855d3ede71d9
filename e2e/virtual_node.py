"""A node that is a virtual machine of vm/, with a kernel, systemd and cgroup v2 of its own, as users have.

Its emulated processor runs Python seven times slower. The machine has one more device, a port of the control
plane's bridge. A second disk has the programs and the images.
"""

import contextlib
import shlex
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from e2e import configuration, network
from e2e.artifacts import FENKA, fenka_image
from e2e.cluster import Node
from e2e.image_files import run_checked
from e2e.images import busybox, copy_store, pause, workload
from e2e.machine import VIRTUAL, ClusterError, run, wait_until
from e2e.programs import CRIO, OWN, build
from vm import guest_disk
from vm.guest import QemuGuest

PROGRAMS = OWN.directory() / "bin"
PATH = f"{PROGRAMS}:/usr/sbin:/usr/bin:/sbin:/bin"
KINDS = {
    "systemd": ("systemd", configuration.CONTAINERD),
    "cgroupfs": ("cgroupfs", configuration.CONTAINERD),
    "cri-o": ("systemd", configuration.CRIO),
}
"""The cgroup driver and the container runtime's socket of each kind of node."""

DISK = "/mnt"
"""Where the machine has its second disk."""

DISK_SIZE = "8G"
"""It holds all images, and what containers write. Only what is used takes space."""

CONNECT = "import socket, sys; socket.socket(socket.AF_UNIX).connect(sys.argv[1])"
MEMORY_MIB = 3072
UNIT = """\
[Service]
Environment={environment}
ExecStart={command}
KillMode=process
Delegate=yes
LimitNOFILE=1048576
TasksMax=infinity
"""
"""As the packages of containerd and the kubelet have it. What they started lives on when they end."""

PREPARE = f"""\
mountpoint -q {DISK} || mount /dev/vdb {DISK}
mkdir -p {DISK}/containerd /var/lib/containerd {PROGRAMS.parent}
mountpoint -q /var/lib/containerd || mount --bind {DISK}/containerd /var/lib/containerd
mkdir -p {DISK}/storage /var/lib/containers/storage /etc/containers
mountpoint -q /var/lib/containers/storage || mount --bind {DISK}/storage /var/lib/containers/storage
echo '{{"default": [{{"type": "insecureAcceptAnything"}}]}}' > /etc/containers/policy.json
ln -sfn {DISK}/bin {PROGRAMS}
loginctl enable-linger root
"""
"""Without the last line each login starts an instance of systemd, which takes seconds."""


def add_crio(content: Path) -> None:
    """Add CRI-O's programs and a store with the images of fenka's scenarios to the files of a disk."""
    build(CRIO)
    shutil.copy(CRIO.directory() / "bin" / "crio", content / "bin")
    pinns = CRIO.source("github.com/cri-o/cri-o") / "pinns" / "src"
    output = content / "bin" / "pinns"
    run(["gcc", "-static", "-O2", "-o", str(output), *map(str, pinns.glob("*.c"))])
    with tempfile.TemporaryDirectory() as running:
        store = (
            "--storage-driver=overlay",
            f"--root={content / 'storage'}",
            f"--runroot={running}",
        )
        for archive in (pause(), busybox(), workload()):
            run_checked(["buildah", *store, "pull", "--quiet", f"docker-archive:{archive}"])
        pulled = run_checked(["buildah", *store, "pull", "--quiet", f"oci-archive:{fenka_image()}"])
        run_checked(["buildah", *store, "tag", pulled.strip(), FENKA])


def parts() -> dict[str, str]:
    """Return the versions of what differs on such a node, for recording.py."""
    root = guest_disk.build().root
    kernel = next((root / "boot").glob("vmlinuz-*")).name.removeprefix("vmlinuz-")
    runc = guest_disk.output("chroot", root, "runc", "--version").split()[2]
    found = {"cgroup": "v2", "Linux": ".".join(kernel.split(".")[:2]), "runc": runc}
    if VIRTUAL == "cri-o":
        found = {"CRI-O": CRIO.version("github.com/cri-o/cri-o").removeprefix("v"), **found}
    return found


class VirtualNode(Node):
    """A node whose daemons are units of systemd in a virtual machine."""

    def __init__(self, *arguments: Any, kind: str) -> None:
        """Args:
        arguments: Node's.
        kind: one of KINDS.
        """
        super().__init__(*arguments)
        if kind not in KINDS:
            raise ClusterError(f"FENKA_E2E_VIRTUAL={kind}: choose {', '.join(KINDS)}")
        self.driver, self.runtime = KINDS[kind]
        self._guest: QemuGuest | None = None
        self._second_disk = self.files.folder / "second.ext4"

    @property
    def guest(self) -> QemuGuest:
        """The machine. Raises ClusterError if it is switched off."""
        if self._guest is None:
            raise ClusterError(f"{self.name} is switched off")
        return self._guest

    @property
    def has_crio(self) -> bool:
        """Whether CRI-O takes containerd's place."""
        return self.runtime == configuration.CRIO

    # Power.

    def power_on(self, owner: int | None = None) -> None:
        """Make the disks. connect() switches the machine on, and it ends with this process."""
        del owner
        missing = guest_disk.missing_packages()
        if missing:
            raise ClusterError(f"a virtual machine needs packages: apt install {' '.join(missing)}")
        folder = self.files.folder
        folder.mkdir(parents=True)
        content = folder / "second"
        shutil.copytree(PROGRAMS, content / "bin", symlinks=True)
        (content / "storage").mkdir()
        if self.has_crio:
            add_crio(content)
        elif self.cluster.images:
            copy_store(self.cluster.images, content / "containerd")
        guest_disk.make_filesystem(content, self._second_disk, DISK_SIZE)
        shutil.rmtree(content)

    def power_off(self) -> None:
        """Keep the journal, and switch the machine off."""
        if self._guest is None:
            return
        self.logs.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(subprocess.TimeoutExpired):
            journal = self.guest.attempt("journalctl --boot --no-pager", within_s=60)
            (self.logs / "journal.log").write_text(journal.stdout)
        self.guest.close()
        self._guest = None

    def is_on(self) -> bool:
        """Return whether somebody can log in."""
        return self.guest.attempt("true").returncode == 0

    def reboot(self) -> None:
        """Let the machine lose power and boot again, and wait until the node is Ready."""
        self.guest.lose_power()
        self._configure_network()
        self.start_containerd()
        began = time.time()
        self.start_kubelet()
        self.wait_until_ready(since=began)

    # Network.

    def connect(self) -> None:
        """Add a port to the bridge, and switch the machine on."""
        plane, subnets = self.cluster.control_plane, self.cluster.layout.pod_subnets()
        link, address = f"node{self.number}", network.hardware_address(self)
        network.add_port(plane, f"tuntap add {link} mode tap", link, self, subnets)
        self._guest = QemuGuest(
            guest_disk.build(),
            self.files.folder,
            self._second_disk,
            enter=tuple(plane.network_command("setpriv", "--pdeathsig", "KILL", "--")),
            devices=(
                *("-netdev", f"tap,id=lan,ifname={link},script=no,downscript=no"),
                *("-device", f"virtio-net-pci,netdev=lan,mac={address},romfile="),
            ),
            memory_mib=MEMORY_MIB,
            writable=True,
        )
        self._guest.start()
        self._configure_network()

    def _configure_network(self) -> None:
        address = network.hardware_address(self)
        shown = self.run("ip", "-brief", "link", "show").splitlines()
        (device,) = (line.split()[0] for line in shown if address in line)
        plane, subnets = self.cluster.control_plane, self.cluster.layout.pod_subnets()
        lines = network.routes(device, plane, self, subnets)
        self.run("ip", "-batch", "-", stdin="\n".join(lines))
        self.run("sysctl", "-qw", "net.ipv4.ip_forward=1")
        self.run("sh", "-c", PREPARE)

    # Programs.

    def command(self, *argv: str) -> list[str]:
        """Return a command that runs argv in the machine."""
        return [*self.guest.login("root"), shlex.join(["env", f"PATH={PATH}", *argv])]

    def read(self, path: str) -> str:
        """Return the text of a file of the machine."""
        return self.run("cat", path)

    def prepare(self) -> None:
        """Start what a node can start before the API server is up."""
        self.start_containerd()

    def start_containerd(self) -> None:
        """Start containerd or, in its place and by its name, CRI-O, and wait until it answers."""
        if not self.has_crio:
            super().start_containerd()
            return
        self.write_pod_network()
        settings = self.files.folder / "crio.toml"
        settings.write_text(configuration.crio(PROGRAMS, self.driver))
        self.start("containerd", ["crio", f"--config={settings}", "--config-dir="])
        self.wait_for_containerd()

    def wait_for_containerd(self) -> None:
        """Wait until containerd, or CRI-O, answers."""
        if not self.has_crio:
            super().wait_for_containerd()
            return
        ask = ("python3", "-c", CONNECT, self.runtime)
        # It prints nothing, and fails until there is a socket.
        wait_until(f"{self.name}: CRI-O", lambda: self.run(*ask) == "")

    def import_image(self, archive: Path) -> None:
        """Load an archive of an image, which takes long: ssh copies 2 MB/s."""
        command = self.command("ctr", "-n", "k8s.io", "images", "import", "-")
        run(["sh", "-c", f"{shlex.join(command)} < {shlex.quote(str(archive.resolve()))}"])

    # Daemons.

    def start(
        self, daemon: str, argv: Sequence[str], environment: Mapping[str, str] | None = None
    ) -> None:
        """Start a daemon as a unit of systemd."""
        self._copy_settings()
        variables = {"PATH": PATH, **(environment or {})}
        unit = UNIT.format(
            environment=" ".join(f"{name}={value}" for name, value in variables.items()),
            command=shlex.join([f"{PROGRAMS}/{argv[0]}", *argv[1:]]),
        )
        # In /run, so that no boot starts it before the machine has its network.
        self.run("tee", f"/run/systemd/system/{daemon}.service", stdin=unit)
        self.run("systemctl", "daemon-reload")
        self.start_again(daemon)

    def start_again(self, daemon: str) -> None:
        """Start a daemon with the command of its last start."""
        self.run("systemctl", "start", daemon)

    def kill(self, daemon: str, number: signal.Signals = signal.SIGKILL) -> None:
        """Send a signal to a daemon; after SIGKILL or SIGTERM wait until it has ended."""
        self.run("systemctl", "kill", "--kill-whom=main", f"--signal={int(number)}", daemon)
        if number in {signal.SIGKILL, signal.SIGTERM}:
            wait_until(f"{self.name}: the end of {daemon}", lambda: not self.runs(daemon))
            self.run("systemctl", "reset-failed")

    def runs(self, daemon: str) -> bool:
        """Return whether the daemon is alive."""
        shown = self.run("systemctl", "show", "--property=ActiveState", "--value", daemon)
        return shown.strip() == "active"

    def _copy_settings(self) -> None:
        """Copy certificates and settings of this node to the same paths, and those of its disk to /."""
        pki, folder = self.cluster.state / "pki", self.files.folder
        stems = (
            "ca.crt",
            "kube-proxy.*",
            f"kubelet-{self.name}.*",
            f"kubelet-serving-{self.name}.*",
        )
        files = [path for stem in stems for path in pki.glob(stem)]
        files += [*folder.glob("*.toml"), *folder.glob("*.yaml")]
        listed = " ".join(shlex.quote(str(path.relative_to("/"))) for path in files)
        packed = f"tar --create --directory / {listed} --directory {folder}/disk ."
        run(["sh", "-c", f"{packed} | {shlex.join(self.command('tar', '-x', '-C', '/'))}"])
