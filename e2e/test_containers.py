"""Containers of a real engine in slices: Debian's Podman with runc and crun, rootful and rootless."""

import os
import shutil
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from e2e.podman import ALICE, ARCHIVE, IMAGE, PodmanMachine, eventually, image_archive, machine

DEVICE = ("--device", "fenka.io/slice=4")
FULL = pytest.mark.full
RUNTIMES = [name for name in ("runc", "crun") if shutil.which(name)]

pytestmark = [
    pytest.mark.skipif(os.geteuid() != 0, reason="the daemon of all users is root's"),
    pytest.mark.skipif(not shutil.which("podman"), reason="apt-get install podman crun"),
]


@pytest.fixture(scope="module")
def archive(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An image of the client."""
    return image_archive(tmp_path_factory.mktemp("image"))


@pytest.fixture(scope="module", params=RUNTIMES)
def podman(request: pytest.FixtureRequest, archive: Path) -> Iterator[PodmanMachine]:
    """A machine with one T4: 15079 MiB, 14 units."""
    with machine(request.param, archive) as made:
        yield made


@pytest.fixture(autouse=True)
def _remove_containers(podman: PodmanMachine) -> Iterator[None]:
    yield
    podman.remove_containers()


@pytest.mark.parametrize(
    "options",
    [
        "",
        *(
            pytest.param(f"--{option}", marks=FULL)
            for option in ("user=1000", "read-only", "privileged")
        ),
        *(
            pytest.param(f"--{option}", marks=FULL)
            for option in ("pid=host", "cgroups=disabled", "init")
        ),
    ],
)
def test_last_mib_of_the_slice_fits_and_no_more(podman: PodmanMachine, options: str) -> None:
    """4 units of a T4 are 15079 * 4 // 14 = 4308 MiB, whatever the options; 2 is out of memory."""
    if podman.runtime == "runc" and "cgroups" in options:
        pytest.skip("runc always makes a control group")
    for mib, result in ((4308, 0), (4309, 2)):
        done = podman.container(*options.split(), *DEVICE, IMAGE, "slice_client", str(mib))
        assert done.stdout == f"1 4308 {result}\n", done.stderr


@pytest.mark.parametrize(
    "options",
    [
        "",
        *(
            pytest.param(f"--{option}", marks=FULL)
            for option in ("user=1000", "read-only", "userns=keep-id")
        ),
    ],
)
def test_rootless_container_has_its_slice(podman: PodmanMachine, options: str) -> None:
    """It counts for its user, whom the kernel names."""
    podman.podman("load", "-q", "-i", ARCHIVE, user=ALICE)
    for mib, result in ((4308, 0), (4309, 2)):
        words = (*options.split(), *DEVICE, IMAGE, "slice_client", str(mib))
        done = podman.container(*words, user=ALICE)
        assert done.stdout == f"1 4308 {result}\n", done.stderr
    podman.podman("run", "-d", "--name", "a", *DEVICE, IMAGE, "sleep", "1000", user=ALICE)
    (job,) = podman.jobs().values()
    assert (job["user"], job["state"]) == ("alice", "running")
    podman.podman("rm", "-f", "-t", "0", "a", user=ALICE)


@FULL
def test_rootless_container_counts_for_nobody_else(podman: PodmanMachine) -> None:
    """Annotations are the user's own words."""
    podman.podman("load", "-q", "-i", ARCHIVE, user=ALICE)
    words = ("--annotation", "fenka.io/user=root", *DEVICE, IMAGE, "sleep", "1")
    assert podman.container(*words, user=ALICE).returncode != 0
    log = podman.run("cat", "/run/fenka/daemon.log").stdout
    assert "only root's containers count for others" in log


def test_engine_works_while_a_container_is_held(podman: PodmanMachine) -> None:
    """Only the container's program waits."""
    whole = ("--device", "fenka.io/slice=14")
    podman.podman("run", "-d", "--name", "first", *whole, IMAGE, "sleep", "1000")
    podman.podman("run", "-d", "-i", "--name", "held", *whole, IMAGE, "slice_client", "15000")
    assert podman.podman("inspect", "-f", "{{.State.Status}}", "held") == "running"
    assert podman.podman("exec", "held", "id", "-u") == "0"
    said = podman.run("podman", "logs", "held")
    assert "waiting for this container's slice: place 1 of 1" in said.stdout + said.stderr
    podman.podman("stop", "-t", "0", "first")
    eventually(lambda: "1 15079 0" in podman.run("podman", "logs", "held").stdout)
    podman.podman("run", "-d", "--name", "third", *whole, IMAGE, "slice_client", "1")
    podman.podman("stop", "-t", "60", "third")
    assert podman.podman("inspect", "-f", "{{.State.ExitCode}}", "third") == "143"


@FULL
def test_killed_container_is_restarted_with_a_new_lease(podman: PodmanMachine) -> None:
    """By its engine, which needs no command of fenka's."""
    podman.podman(
        "run", "-d", "--restart", "always", "--name", "r", *DEVICE, IMAGE, "sleep", "1000"
    )
    (job,) = podman.jobs().values()
    os.kill(job["pid"], signal.SIGKILL)
    again = eventually(
        lambda: next((j for j in podman.jobs().values() if j["pid"] != job["pid"]), None)
    )
    assert (again["name"], again["state"]) == (job["name"], "running")
    assert again["id"] != job["id"]


@FULL
def test_containers_outlive_the_daemon(podman: PodmanMachine) -> None:
    """One that runs goes on, one that is held is granted by the next daemon, and one that starts waits."""
    most = ("--device", "fenka.io/slice=12")
    podman.podman("run", "-d", "--name", "first", *most, IMAGE, "sleep", "1000")
    podman.podman("run", "-d", "-i", "--name", "held", *most, IMAGE, "slice_client", "9000")
    podman.kill_daemon()
    podman.podman("stop", "-t", "0", "first")
    with ThreadPoolExecutor(1) as pool:
        small = ("run", "-d", "-i", "--device", "fenka.io/slice=1", IMAGE, "slice_client", "1077")
        starting = pool.submit(podman.podman, *small)
        podman.start_daemon()
        name = starting.result()
    eventually(lambda: "1 12924 0" in podman.run("podman", "logs", "held").stdout)
    eventually(lambda: "1 1077 0" in podman.run("podman", "logs", name).stdout)


def test_containers_root_cannot_change_its_limits(podman: PodmanMachine) -> None:
    """It lacks the capability, and the mounts are read-only."""
    attempts = (
        "busybox umount /run/fenka/lease; busybox mount -o remount,rw /run/fenka/lease",
        "echo x > /run/fenka/lease/control; rm -f /run/fenka/lease/control /etc/ld.so.preload",
        "unset LD_PRELOAD; exec slice_client 4309",
    )
    done = podman.container(*DEVICE, IMAGE, "sh", "-c", "; ".join(attempts))
    assert done.stdout == "1 4308 2\n", done.stderr


@FULL
def test_image_cannot_lead_the_lease_elsewhere(podman: PodmanMachine) -> None:
    """Its links are resolved in the container only, and its environment does not replace the shim."""
    hosts = sorted(os.listdir("/etc"))
    podman.podman(
        "run", "--name", "l", IMAGE, "sh", "-c", "rm -rf /run/fenka; ln -s /etc /run/fenka"
    )
    podman.podman(
        *(
            "commit",
            "-q",
            "-c",
            "ENV LD_PRELOAD=/x.so",
            "-c",
            "ENV FENKA_PRIORITY=9",
            "l",
            "hostile",
        )
    )
    done = podman.container(*DEVICE, "localhost/hostile", "slice_client", "4309")
    assert done.stdout in ("1 4308 2\n", "")
    assert sorted(os.listdir("/etc")) == hosts


@FULL
def test_twenty_starts_leave_no_mount_of_fenkas(podman: PodmanMachine) -> None:
    """Each has ten; all are in the container's namespace, and end with it."""

    def mounts() -> list[str]:
        lines = podman.run("cat", "/proc/self/mountinfo").stdout.splitlines()
        return sorted(line.split(" ", 2)[2] for line in lines if "fenka" in line)

    before = mounts()
    for _ in range(20):
        assert podman.container(*DEVICE, IMAGE, "slice_client", "1").returncode == 0
    eventually(lambda: not podman.jobs())
    assert mounts() == before


@FULL
def test_twenty_at_once_get_their_turns(podman: PodmanMachine) -> None:
    """14 of one unit fit, and each finds its whole slice free when its turn comes."""

    def run(_: int) -> str:
        done = podman.container(
            "--device", "fenka.io/slice=1", IMAGE, "sh", "-c", "slice_client 1077 && sleep 1"
        )
        return done.stdout

    with ThreadPoolExecutor(20) as pool:
        assert [*pool.map(run, range(20))] == ["1 1077 0\n"] * 20
