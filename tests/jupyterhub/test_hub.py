"""Servers of two users and more, by a real JupyterHub with root's daemon, on a machine of their own."""

from collections.abc import Iterator

import pytest

from tests.jupyterhub.hub import ADA, BEN, CONFIG, CULLER, HOMES, ODD, USERS, Hub, hub_on
from tests.waiting import wait_until
from tests.workstation.shared_machine import shared_machine

pytestmark = [pytest.mark.process, pytest.mark.timeout(300)]

CAPS = 'version = 1\nuser.ben = {memory = "10000MiB"}\n'
ODD_NAME = "o'neil.zoë@lab"


@pytest.fixture(scope="module")
def machine_hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hub]:
    """A T4 with 14 units, of which ben may hold 10000 MiB."""
    log = tmp_path_factory.mktemp("hub") / "log"
    with shared_machine() as machine:
        machine.write("/etc/fenka/users.toml", CAPS)
        machine.ok(0, "daemon", "--background", "--simulate", "T4")
        with hub_on(machine, log) as hub:
            yield hub


@pytest.fixture
def hub(machine_hub: Hub, request: pytest.FixtureRequest) -> Iterator[Hub]:
    """The hub without servers."""
    yield machine_hub
    for user in USERS:
        machine_hub.stop(user)
    wait_until(lambda: not machine_hub.machine.jobs())


def test_server_runs_as_its_user_in_the_slice_of_the_choice(hub: Hub) -> None:
    """4 of 14 units of a T4 are 4308 MiB. The user pays, not root, and stopping releases the slice."""
    page = hub.ask("ada", "/hub/spawn")["text"]
    assert '<option value="8">8</option>' in page
    assert "Free now: 15079 of 15079 MiB of card 0 (Tesla T4)." in page
    server = hub.started("ada", "4")
    assert (server["uid"], server["groups"]) == (ADA, [ADA])
    assert server["directory"] == f"{HOMES}/{ADA}"
    assert (server["cards"], server["total"]) == (1, 4308)
    (job,) = hub.jobs("ada")
    assert (job["name"], job["uid"], job["pid"], job["state"]) == (
        "jupyter-ada", ADA, server["pid"], "running",
    )  # fmt: skip
    assert "Free now: 10771 of 15079 MiB" in hub.ask("ben", "/hub/spawn")["text"]
    hub.stop("ada")
    assert hub.machine.jobs() == {}


def test_server_without_a_card_sees_none(hub: Hub) -> None:
    """And takes none, though the driver's libraries are there."""
    server = hub.started("ada", "none")
    assert (server["cards"], server["visible"], server["uid"]) == (0, "", ADA)
    assert hub.machine.jobs() == {}


def test_documented_profiles_are_understood(hub: Hub) -> None:
    """Whole cards and shares of their time, too."""
    for profile, summary in (
        ("8 GiB and half of a card's time", "8, 50% hard"),
        ("a whole card for two hours", "whole"),
    ):
        assert hub.started("ada", profile)["cards"] == 1
        assert [job["summary"] for job in hub.jobs("ada")] == [summary]
        hub.stop("ada")


def test_waiting_user_sees_position_and_reason_and_starts_when_a_server_ends(hub: Hub) -> None:
    """12 + 4 units do not fit into 14."""
    hub.started("ada", "12")
    assert "/hub/spawn-pending/" in hub.choose("ben", "4")["url"]
    said = hub.progress("ben", events=2)
    reason = "waiting, position 1 of 1: no GPU fits: 1 of 1 has too little memory"
    assert said[1] == {"progress": 10, "message": reason}
    assert "; 1 waiting." in hub.ask(ODD_NAME, "/hub/spawn")["text"]
    hub.stop("ada")
    messages = [event["message"] for event in hub.progress("ben")]
    assert messages[-1] == "Server ready at /user/ben/"
    assert hub.server("ben")["uid"] == BEN


def test_user_can_stop_waiting(hub: Hub) -> None:
    """The request leaves the queue."""
    hub.started("ada", "12")
    hub.choose("ben", "4")
    wait_until(lambda: hub.jobs("ben"))
    hub.stop("ben")
    assert hub.jobs("ben") == []
    assert hub.server("ada")["total"] == 12924


@pytest.mark.parametrize(
    "profile", ["3", "-4", "1e99", "", "4 --gpus 1", "4\n--gpus\n1", "9" * 100_000, "<b>", "none\0"]
)
def test_forged_form_is_refused(hub: Hub, profile: str) -> None:
    """The page says so. Nothing that a user sends becomes an option of a command."""
    answer = hub.choose("ada", profile)
    assert answer["status"] == 400
    assert (
        "is not offered: choose one of no card, 4 GiB of a card, 8 GiB and half of a card"
        in answer["text"]
    )
    assert "<b>" not in answer["text"]
    assert hub.machine.jobs() == {}


@pytest.mark.parametrize(
    "options", [{"profile": 4}, {"profile": ["4"]}, {"profile": {"4": 4}}, {"profile": None}]
)
def test_forged_options_of_the_api_are_refused(hub: Hub, options: object) -> None:
    """It passes any JSON to the spawner."""
    answer = hub.api("ada", "POST", json=options)
    assert answer["status"] == 400, answer
    assert "is not offered" in answer["text"]
    assert hub.machine.jobs() == {}


def test_user_beyond_a_cap_gets_the_sentence(hub: Hub) -> None:
    """12 units are 12924 MiB, of which ben never gets 10000. A profile that contradicts itself says so."""
    for profile, sentence in (
        ("12", "ben may hold at most 10000 MiB, and this request needs 12924 MiB: ask for less"),
        ("wrong", "--gpus takes whole cards: leave out --gpu-mem and --cards, or leave out --gpus"),
        ("odd", "the server was not started: the hub&#39;s log says why"),
    ):
        said = hub.choose("ben", profile)["text"]
        if "spawn-error-msg" not in said:
            events = hub.progress("ben")
            assert events[-1]["failed"]
            said = events[-1]["message"].replace("'", "&#39;")
        assert sentence in said
    assert hub.machine.jobs() == {}


def test_user_who_holds_the_most_that_the_cap_allows_waits_with_that_reason(hub: Hub) -> None:
    """8616 MiB of a notebook of another kind, and 4308 MiB more."""
    hub.machine.hold(BEN, "--gpu-mem", "8", "--name", "other")
    wait_until(lambda: hub.jobs("ben"))
    hub.choose("ben", "4")
    said = hub.progress("ben", events=2)
    assert said[1]["message"].endswith("ben holds 8616 of at most 10000 MiB")
    hub.machine.ok(BEN, "stop", "other")
    assert hub.server("ben")["total"] == 4308


def test_hub_that_was_killed_finds_running_and_waiting_servers(hub: Hub) -> None:
    """Neither the slice nor the place in the queue is lost."""
    pid = hub.started("ada", "12")["pid"]
    hub.choose("ben", "4")
    wait_until(lambda: [job["state"] for job in hub.jobs("ben")] == ["waiting"])
    waiting = hub.jobs("ben")[0]["pid"]
    hub.kill()
    hub.start()
    assert hub.server("ada")["pid"] == pid
    assert hub.jobs("ben")[0]["state"] == "waiting"
    hub.stop("ada")
    assert hub.server("ben")["pid"] == waiting
    assert hub.server("ben")["total"] == 4308


def test_slice_is_free_when_a_server_was_killed(hub: Hub) -> None:
    """Also of a program that it has left, and if the hub was down."""
    for restarted in (False, True):
        pid = hub.started("ada", "12")["pid"]
        left = hub.server("ada", "leave")["left"]
        if restarted:
            hub.kill()
        hub.machine.run(f"kill -9 {pid}")
        if restarted:
            assert [job["name"] for job in hub.jobs("ada")] == ["jupyter-ada"]
            hub.start()
        wait_until(lambda: not hub.jobs("ada"))
        wait_until(lambda: not hub.servers("ada"))  # the hub asks once a second
        # It may be a zombie, since nobody reaps it here.
        hub.machine.run(f"! grep -qs '^State:.[^ZX]' /proc/{left}/status")


def test_servers_go_on_without_the_daemon_and_new_ones_wait_for_it(hub: Hub) -> None:
    """Who starts one meanwhile sees what root has to do."""
    pid = hub.started("ada", "4")["pid"]
    hub.machine.signal_daemon("KILL")
    assert "fenka does not answer now" in hub.ask("ben", "/hub/spawn")["text"]
    hub.choose("ben", "2")
    said = hub.progress("ben", events=2)[1]["message"]
    assert said.startswith("waiting for this machine's daemon: root has to start it, with ")
    hub.machine.ok(0, "daemon", "--background", "--simulate", "T4")
    assert hub.server("ben")["total"] == 2154
    assert hub.server("ada")["pid"] == pid
    assert [job["state"] for job in hub.jobs("ada")] == ["running"]


def test_user_with_an_odd_name_gets_a_server(hub: Hub) -> None:
    """The job's name has other characters, and tells this user's servers apart."""
    server = hub.started(ODD_NAME, "2")
    assert (server["uid"], server["name"], server["total"]) == (ODD, ODD_NAME, 2154)
    (job,) = hub.jobs(ODD_NAME)
    assert (job["uid"], job["name"]) == (ODD, "jupyter-o-neil.zo--lab-477339a2")


EVIL = "import os; open('/tmp/evil', 'a').write(f'{os.getuid()}\\n')\n"


def test_files_of_a_user_never_run_as_root(hub: Hub) -> None:
    """His home is the server's directory, and has modules that fenka and the hub import by name."""
    hub.machine.run("touch /tmp/evil && chmod 666 /tmp/evil")
    for module in (
        "fenka/__init__",
        "fenka/jupyterhub",
        "jupyterhub/__init__",
        "typing",
        "sitecustomize",
    ):
        path = f"{HOMES}/{ADA}/{module}.py"
        hub.machine.run(f"mkdir -p $(dirname {path})")
        hub.machine.write(path, EVIL)
    hub.machine.run(f"mkfifo {HOMES}/{ADA}/.jupyter && chown -R {ADA} {HOMES}/{ADA}")
    assert hub.started("ada", "2")["total"] == 2154
    assert set(hub.machine.read("/tmp/evil").split()) <= {str(ADA)}
    hub.stop("ada")
    hub.machine.run(f"rm -r {HOMES}/{ADA}/*")


@pytest.fixture
def culled_hub(hub: Hub) -> Iterator[Hub]:
    """The hub with the documentation's culler, and a second in place of hours."""
    hub.end()
    hub.config = CONFIG + CULLER.replace("--timeout=7200", '--timeout=1", "--cull-every=1')
    hub.start()
    yield hub
    hub.end()
    hub.config = CONFIG
    hub.start()


def test_idle_server_is_ended_by_jupyterhubs_culler(culled_hub: Hub) -> None:
    """Its slice is free. It may have ended before anybody has seen it."""
    before = culled_hub.ended("ada")
    culled_hub.choose("ada", "12")
    wait_until(lambda: culled_hub.ended("ada") > before)
    assert culled_hub.machine.jobs() == {}
