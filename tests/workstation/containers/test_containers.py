"""Containers in slices: the real hook, daemon, shim and simulated card, with a small runtime."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from fenka import procfs
from fenka.hardware.peer_credentials import PeerProcess
from fenka.workstation.accepting import Caller
from fenka.workstation.containers.container_request import InvalidContainer
from fenka.workstation.containers.hook_server import _check_init
from tests.control_groups import make_group
from tests.workstation.conftest import Workstation, eventually
from tests.workstation.containers.runtime import HOOK, PLACE, MiniContainer, sealed, send_request
from tests.workstation.users import User, as_root, stranger, victim  # noqa: F401

pytestmark = as_root


def leases(station: Workstation) -> list[str]:
    """Return the directories of leases."""
    return os.listdir(station.root / "leases")


@pytest.mark.parametrize(("mib", "result"), [(4308, 0), (4309, 2)])
def test_program_of_a_container_has_its_slice(t4: Workstation, mib: int, result: int) -> None:
    """4 units of a T4 are 15079 * 4 // 14 = 4308 MiB; 2 is out of memory."""
    container = MiniContainer(t4, mib)
    container.start()
    assert container.results() == [result]
    job = container.await_state("running")
    assert (job["kind"], job["container_id"], job["pid"]) == (
        "container",
        container.id,
        container.init,
    )
    container.kill()
    container.await_end()
    assert leases(t4) == []


def test_container_is_held_until_its_slice_is_free(t4: Workstation) -> None:
    """Its hook does not wait: the program does, and says what for."""
    first, second = MiniContainer(t4, 10000), MiniContainer(t4, 10000)
    first.start("slice=10")
    first.results()
    second.start("slice=10GiB")
    said = second.program.says()
    assert said.startswith(
        "fenka: waiting for this container's slice: place 1 of 1 in the queue: no GPU fits"
    )
    assert second.await_state("waiting")["reason"].startswith("no GPU fits")
    first.kill()
    assert second.results() == [0]
    assert second.program.says() == "fenka: the slice is granted"
    second.await_state("running")
    second.kill()
    second.await_end()
    first.await_end()


def test_first_call_of_cuda_is_held_where_the_first_process_has_no_shim(t4: Workstation) -> None:
    """That of a static first process, such as `docker run --init` has."""
    first, second = MiniContainer(t4), MiniContainer(t4, 15000, child=True)
    first.start("slice=14")
    second.start("slice=14")
    assert second.program.says().startswith("fenka: waiting for this container's slice: place 1")
    first.kill()
    assert second.results() == [0]
    second.kill()
    second.await_end()


def test_held_container_ends_at_once_when_it_is_terminated(t4: Workstation) -> None:
    """A first process ignores SIGTERM by default, and `docker stop` would take ten seconds."""
    first, second = MiniContainer(t4), MiniContainer(t4)
    first.start("slice=14")
    second.start("slice=14")
    second.program.says()
    assert second.kill(signal.SIGTERM) == 143
    second.await_end()
    first.kill()
    first.await_end()
    assert leases(t4) == []


def test_container_that_may_not_wait_is_refused(t4: Workstation) -> None:
    """The engine shows the reason, and nothing is left."""
    first = MiniContainer(t4)
    first.start("slice=10")
    refused = MiniContainer(t4, 1, "FENKA_WAIT=refuse")
    assert refused.hook("slice=10").startswith("no GPU fits")
    assert [*t4.jobs()] == [first.name]
    assert leases(t4) == [t4.jobs()[first.name]["id"]]


def test_impossible_request_is_refused(t4: Workstation) -> None:
    """It would wait for ever."""
    assert "the largest card has 14 units" in MiniContainer(t4).hook("slice=15")


def test_daemon_that_was_killed_takes_containers_over(t4: Workstation) -> None:
    """One that runs goes on, and one that is held is granted by the next daemon."""
    first, second = MiniContainer(t4, 10000), MiniContainer(t4, 10000)
    first.start("slice=10")
    first.results()
    second.start("slice=10")
    second.program.says()
    t4.kill_daemon()
    t4.start("--simulate", "T4")
    assert first.await_state("running")["pids"]
    second.await_state("waiting")
    first.kill()
    assert second.results() == [0]
    second.await_state("running")
    second.kill()
    second.await_end()


def test_hook_waits_for_a_daemon(station: Workstation) -> None:
    """At a boot, engines may start containers before it."""
    station.root.chmod(0o700)
    container = MiniContainer(station)
    hook = container.start_hook()
    station.start("--simulate", "T4")
    assert hook.wait() == 0
    container.go()
    assert container.results() == [0]


def test_restarted_container_has_its_slice_at_once(t4: Workstation) -> None:
    """Its hook may come before the end of its former init was noticed."""
    former = MiniContainer(t4)
    former.start("slice=14")
    former.results()
    former.kill()
    again = MiniContainer(t4, 15078, id=former.id)
    again.start("slice=14")
    assert again.results() == [0]
    assert again.await_state("running")["pid"] == again.init
    again.kill()
    again.await_end()


def test_kept_slice_is_its_containers_next_start_s(t4: Workstation) -> None:
    """A waiting request does not get it in between; `fenka stop` gives it up."""
    former = MiniContainer(t4, 1, "FENKA_KEEP=10m")
    former.start("slice=14")
    former.results()
    waiting = MiniContainer(t4)
    waiting.start("slice=1")
    waiting.program.says()
    former.kill()
    eventually(lambda: not t4.jobs()[former.name]["pids"])
    assert " kept " in t4.ok("ps")
    again = MiniContainer(t4, 15078, "FENKA_KEEP=10m", id=former.id)
    again.start("slice=14")
    assert again.results() == [0]
    again.kill()
    eventually(lambda: not t4.jobs()[again.name]["pids"])
    t4.ok("stop", again.name)
    assert waiting.results() == [0]


def test_kept_slice_stays_when_another_user_s_container_claims_its_id(station: Workstation) -> None:
    """An id is what the hook's caller says. The stranger waits for room, as with any other id."""
    station.start("--simulate", "T4", "--charge", "annotation")
    former = MiniContainer(station, 1, "FENKA_KEEP=10m")
    former.config["annotations"] = {"fenka.io/user": "nobody"}
    former.start("slice=14")
    former.results()
    former.kill()
    eventually(lambda: not station.jobs()[former.name]["pids"])
    claiming = MiniContainer(station, 1, "FENKA_NAME=stranger", id=former.id)
    claiming.config["annotations"] = {"fenka.io/user": "daemon"}
    claiming.start("slice=1")
    claiming.program.says()
    jobs = station.jobs()
    assert (jobs[former.name]["user"], jobs["stranger"]["state"]) == ("nobody", "waiting")
    station.ok("stop", former.name)
    assert claiming.results() == [0]


def test_stop_ends_a_container_and_names_its_engine(t4: Workstation) -> None:
    """First its init, in order; then all that is left."""
    container = MiniContainer(t4, 1, "FENKA_NAME=train")
    container.config["annotations"] = {"io.container.manager": "libpod"}
    container.start()
    container.results()
    assert "train is a container: `podman logs" in t4.fenka("logs", "train").stderr
    said = t4.ok("stop", "--grace", "0", "train")
    assert said == "train: stopped; its engine may start it again\n"
    assert container.program.process.wait() != 0


def test_stop_ends_a_paused_container(t4: Workstation) -> None:
    """`docker pause` freezes it, and with version 1 of control groups SIGKILL waits for the thaw."""
    freezer = Path("/sys/fs/cgroup/freezer")
    if not (freezer / "cgroup.procs").exists():
        pytest.skip("no freezer of version 1 is mounted here")
    with make_group(freezer.with_name("devices")) as devices:
        # An engine gives the container's groups in all hierarchies the same name.
        same = freezer / devices.name
        same.mkdir()
        container = MiniContainer(t4, 1, "FENKA_NAME=train")
        for own in (devices, same):
            (own / "cgroup.procs").write_text(str(container.init))
        container.start()
        container.results()
        (same / "freezer.state").write_text("FROZEN")
        t4.ok("stop", "--grace", "0", "train")
        container.program.process.wait()
        container.await_end()
        eventually(lambda: not (same / "cgroup.procs").read_text())
        same.rmdir()


def test_container_makes_room_for_a_request_of_higher_priority(t4: Workstation) -> None:
    """It has as long as it said; its engine may start it again, and then it waits."""
    training = MiniContainer(t4, 14000, "FENKA_EVICTION_GRACE=0s")
    training.config["annotations"] = {"fenka.io/priority": "-1"}
    training.start("slice=14")
    training.results()
    model = MiniContainer(t4, 10000)
    model.start("slice=10")
    assert model.results() == [0]
    assert training.program.process.wait() != 0
    assert cause_of_end(t4, training) == "evicted"
    again = MiniContainer(t4, 14000, "FENKA_EVICTION_GRACE=0s", id=training.id)
    again.config["annotations"] = {"fenka.io/priority": "-1"}
    again.start("slice=14")
    again.await_state("waiting")
    model.kill()
    assert again.results() == [0]


def test_kept_slice_makes_room_for_a_request_of_higher_priority(t4: Workstation) -> None:
    """Nothing runs in it, so it is free at once."""
    training = MiniContainer(t4, 1, "FENKA_EVICTION_GRACE=5m", "FENKA_KEEP=10m")
    training.config["annotations"] = {"fenka.io/priority": "-1"}
    training.start("slice=14")
    training.results()
    training.kill()
    eventually(lambda: not t4.jobs()[training.name]["pids"])
    model = MiniContainer(t4, 10000)
    model.start("slice=10")
    assert model.results() == [0]


TERMINABLE = """
import signal, sys
signal.signal(signal.SIGTERM, lambda *_: sys.exit(3))
print("ready", flush=True)
signal.pause()
"""


def test_container_is_ended_at_its_users_time_limit(station: Workstation) -> None:
    """The caps say how long a container may run that nobody pays for. Root's has no limit."""
    users = Path(station.environment["XDG_CONFIG_HOME"]) / "fenka" / "users.toml"
    users.parent.mkdir(parents=True)
    users.write_text('version = 1\nuser.nobody = {time_limit = "1s"}\n')
    users.chmod(0o644)
    station.start_fresh("--simulate", "T4")
    limited = MiniContainer(station, command=[sys.executable, "-c", TERMINABLE])
    unlimited = MiniContainer(station)
    refused = MiniContainer(station, 1, "FENKA_TIME_LIMIT=2s")
    for container in (limited, refused):
        container.config["annotations"] = {"fenka.io/user": "nobody"}
    assert "at most 1s" in refused.hook()
    unlimited.start()
    limited.start()
    assert limited.program.process.wait() == 3
    limited.await_end()
    assert cause_of_end(station, limited) == "time-limit"
    assert "its time limit was over" in station.ok("ps", "-a")
    assert unlimited.await_state("running")["deadline"] is None


def cause_of_end(station: Workstation, container: MiniContainer) -> str:
    """Return why a job has ended, as `fenka ps -a` has it."""
    ended = json.loads(station.ok("ps", "-a", "-o", "json"))["ended"]
    return next(str(job["cause"]) for job in ended if job["name"] == container.name)


def test_limits_change_while_it_runs(t4: Workstation) -> None:
    """As those of any job."""
    container = MiniContainer(t4)
    container.start()
    container.results()
    t4.ok("resize", container.name, "--gpu-mem", "6")
    assert t4.jobs()[container.name]["slices"][0]["memory_mib"] == 15079 * 6 // 14


def test_container_has_its_slice_when_its_root_has_a_blank_in_its_path(t4: Workstation) -> None:
    """The kernel writes such a path with `\\040`. Only a root that is seen from outside has one."""
    place = PLACE.replace("/run/fenka", "'/run/my root/fenka'")
    place = f"mkdir -p '/run/my root/fenka' && {place}"
    container = MiniContainer(t4, 1, place=place)
    assert container.hook() == ""


def test_container_without_a_place_is_refused(t4: Workstation) -> None:
    """A virtual machine or sandbox does not have the mounts that CDI named."""
    assert "has no place for a slice" in MiniContainer(t4, place="true").hook()
    eventually(lambda: not t4.jobs())
    assert leases(t4) == []


def test_second_device_is_refused(t4: Workstation) -> None:
    """It would take a second slice for the same programs."""
    container = MiniContainer(t4)
    assert container.hook() == ""
    assert "several devices of fenka" in container.hook("slice=1")
    assert [*t4.jobs()] == [container.name]


def test_slice_is_released_when_the_hook_is_killed(t4: Workstation) -> None:
    """The runtime then ends the container, which never ran."""
    container = MiniContainer(t4)
    init = os.pidfd_open(container.init)
    config = {"process": {"args": ["x"]}}
    connection, answer = send_request(
        t4, b"slice=4", sealed(container.state()), sealed(config), init
    )
    assert answer.startswith(b"+\0lease\0")
    assert t4.jobs()[container.name]["state"] == "starting"
    connection.close()
    os.close(init)
    container.await_end()
    assert leases(t4) == []


def test_request_that_is_not_the_hooks_is_refused(t4: Workstation, tmp_path: Path) -> None:
    """A file of another's file system could block the daemon, and a pipe too."""
    container = MiniContainer(t4)
    (tmp_path / "state").write_text("{}")
    file, (pipe, _) = os.open(tmp_path / "state", os.O_RDONLY), os.pipe()
    init, state, config = os.pidfd_open(container.init), sealed(container.state()), sealed({})
    for descriptors, sentence in (
        ((), b"no request of fenka-hook"),
        ((file, file, init), b"not sealed"),
        ((pipe, pipe, init), b"not sealed"),
        ((state, config, file), b"process is gone"),
        ((sealed([]), config, init), b"state is not understood"),
    ):
        connection, answer = send_request(t4, b"slice=4", *descriptors)
        assert answer[:1] == b"-"
        assert sentence in answer
        connection.close()
    assert not t4.jobs()


def test_program_of_the_machine_is_no_container(t4: Workstation) -> None:
    """Its mounts are the daemon's own."""
    with subprocess.Popen(["sleep", "1000"]) as process:
        container = MiniContainer(t4)
        assert "no mounts of its own" in container.hook(pid=process.pid)
        process.kill()


def test_hook_refuses_what_is_too_large_or_no_state(t4: Workstation) -> None:
    """Before anything reaches the daemon."""
    container = MiniContainer(t4)
    container.config["process"]["env"] = ["A=" + "x" * (5 << 20)]
    assert "more than 4 MiB" in container.hook()
    container.config = {}
    assert "more than 1 MiB" in container.hook(annotations={"a": "x" * (1 << 20)})
    assert "names no bundle" in container.hook(bundle=1)
    assert "config.json cannot be opened" in container.hook(bundle="/nowhere")
    assert "process is gone" in container.hook(pid=0)
    done = subprocess.run([HOOK, "slice=1"], input=b"[" * 9, capture_output=True, check=False)
    assert (done.returncode, done.stderr[:28]) == (1, b"fenka: the runtime names no ")


@contextlib.contextmanager
def rootless(user: User) -> Iterator[PeerProcess]:
    """A process in namespaces of a user's own, as the init of a rootless container."""
    words = ["setpriv", f"--reuid={user.uid}", f"--regid={user.uid}", "--clear-groups"]
    words += ["unshare", "--map-root-user", "--mount", "sh", "-c", "echo; exec sleep 1000"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, cwd="/") as process:
        assert process.stdout
        process.stdout.readline()
        yield PeerProcess(process.pid, user.uid, -1, procfs.start_ticks(process.pid) or 0)
        process.kill()


def test_strangers_process_cannot_be_named(victim: User, stranger: User) -> None:  # noqa: F811
    """It would count for the stranger, and the stranger's mounts would be in it."""
    with rootless(victim) as init:
        now = int(time.monotonic() * os.sysconf("SC_CLK_TCK"))

        def caller(uid: int, at: int = now) -> Caller:
            return Caller(PeerProcess(os.getpid(), uid, -1, at), uid)

        _check_init(caller(victim.uid), init)
        _check_init(caller(0), init)
        with pytest.raises(InvalidContainer, match="is no container of"):
            _check_init(caller(stranger.uid), init)
        with pytest.raises(InvalidContainer, match="no new container"):
            _check_init(caller(victim.uid, init.start_ticks + 1_000_000), init)
