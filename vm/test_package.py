"""The Debian package: installed, upgraded under running programs, removed and purged."""

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from deploy.release.recipe import ROOT
from tools.docs.blocks import matches, read_page
from tools.docs.shell import timed
from vm.conftest import MACHINE, NEXT, Lab
from vm.guest import Guest
from vm.guest_disk import output

HOLD = "-- sleep 30000"
LEFT = """\
find / -xdev -not -path '/mnt/*' | sort > /root/after
comm -13 /root/before /root/after |
  grep -vE '^/(root|home|tmp|var/(log|cache|lib/(apt|dpkg|systemd)|tmp))/|deb-systemd-helper' || true
"""
"""Prints what is on the disk now and was not there before the package, except what apt and users keep."""

KEPT = (
    r"/(etc/fenka|var/lib/fenka|etc/systemd/system/multi-user.target.wants/fenka.service)[^\n]*\n"
)
"""What a removal leaves for a purge."""


PS = "fenka ps -o json"

PAGE = ROOT / "docs" / "start" / "lab-server.md"

once = pytest.mark.skipif(
    MACHINE != "namespaces",
    reason="depends on no kernel, and would take minutes in an emulated machine: namespaces have it",
)


def jobs(guest: Guest, user: str = "root") -> dict[str, Any]:
    """Return all jobs by user and name."""
    return listed(guest.run(PS, user))


def listed(printed: str) -> dict[str, Any]:
    """Return the jobs that `fenka ps -o json` has printed, by user and name; none if it failed."""
    return {f"{job['user']}/{job['name']}": job for job in json.loads(printed or "[]")}


def start(guest: Guest, user: str, name: str, units: int = 5) -> Any:
    """Start a program in the background that outlives its user's session, and return its job."""
    guest.run(f"fenka run --gpu-mem {units} -d --name {name} {HOLD}", user)
    return guest.until(PS, lambda text: listed(text).get(f"{user}/{name}", {}).get("pids"))


def test_installation_names_the_missing_driver_when_the_machine_has_no_card(installed: Lab) -> None:
    """The boot does not fail, and apt does not."""
    assert "no NVIDIA driver" in installed.status
    assert "--simulate" in installed.status
    assert "Active: inactive" in installed.status
    assert installed.failed == ""
    assert "dpkg: error" not in installed.output


def test_unit_is_valid(guest: Guest) -> None:
    """systemd-analyze prints what it does not like."""
    assert guest.run("systemd-analyze verify --man=no fenka.service 2>&1") == ""
    shown = guest.run("systemctl show fenka -p ActiveState,Type,KillMode,NRestarts")
    assert set(shown.split()) == {
        *("ActiveState=active", "Type=notify", "KillMode=process", "NRestarts=0")
    }


@once
def test_lintian_finds_nothing(packages: Path) -> None:
    """What the package does for a reason is in its list of overrides."""
    package = next((packages / "current").glob("*.deb"))
    assert output("lintian", "--allow-root", package) == ""


def test_two_users_share_the_card(guest: Guest) -> None:
    """They see each other's jobs, and can reach neither their files nor end them."""
    start(guest, "alice", "train")
    start(guest, "bob", "train")
    assert set(jobs(guest, "alice")) == {"alice/train", "bob/train"}
    refused = guest.attempt("fenka run --gpu-mem 5 --no-wait -- true", "alice")
    assert refused.returncode == 75
    assert refused.stderr == "fenka: no GPU fits: 1 of 1 has too little memory\n"
    assert guest.attempt("ls /run/fenka/leases", "alice").returncode != 0
    identity = jobs(guest)["bob/train"]["id"]
    stopped = guest.attempt(f"fenka stop {identity}", "alice")
    assert stopped.returncode != 0
    assert guest.run("fenka stop train", "bob") is not None
    guest.run("fenka run --gpu-mem 5 --timeout 900 -- true", "alice")


@once
def test_two_users_see_what_the_page_of_a_labs_server_shows(guest: Guest) -> None:
    """Their commands, to the output. FENKA_DOCS_TIMES notes the times (tools/newcomer.py)."""
    block = next(block for block in read_page(PAGE).blocks if block.text.startswith("alice$"))
    for user, program in (("alice", "train"), ("bob", "sweep")):
        guest.run(f"echo 'import time; time.sleep(30000)' > {program}.py", user)
    parts = re.split(r"^(alice|bob)\$ (.*)\n", block.text, flags=re.MULTILINE)[1:]
    for user, command, shown in zip(parts[::3], parts[1::3], parts[2::3], strict=True):
        with timed(f"{user}$ {command}"):
            done = guest.attempt(command, user)
        assert matches(shown, done.stdout + done.stderr), f"{command}:\n{done.stdout}{done.stderr}"


def test_upgrade_keeps_programs_and_requests(guest: Guest) -> None:
    """Programs go on in their slices, a pending request keeps its place, and new programs start."""
    before = {user: start(guest, user, "train") for user in ("alice", "bob")}
    guest.run(
        "systemd-run --quiet --collect --uid=bob --unit=pending -E HOME=/home/bob "
        "fenka run --gpu-mem 6 --name next -- sleep 30000"
    )
    guest.until("fenka queue -o json", lambda text: '"next"' in text)
    daemon = guest.run("systemctl show fenka -p MainPID --value")
    guest.run("echo 'deb [trusted=yes] file:/mnt/next ./' > /etc/apt/sources.list")
    upgraded = guest.run("apt-get update 2>&1 && apt-get -y upgrade 2>&1 && dpkg-query -W fenka")
    assert f"fenka\t{NEXT}" in upgraded
    assert guest.run("systemctl show fenka -p MainPID --value") != daemon
    assert guest.run("systemctl is-active fenka") == "active\n"
    found = jobs(guest)
    assert {user: found[f"{user}/train"]["pids"] for user in before} == before
    assert found["bob/next"]["state"] == "waiting"
    guest.run("fenka stop train", "alice")
    guest.until(PS, lambda text: listed(text)["bob/next"].get("pids"))
    assert "Traceback" not in guest.run("journalctl -u fenka -o cat --no-pager")


def test_removal_lets_programs_go_on(guest: Guest) -> None:
    """They keep their limits. fenka that is installed again knows them, and a purge leaves only them."""
    pids = start(guest, "alice", "train")
    removed = guest.run("apt-get remove -y fenka 2>&1")
    assert "programs still hold slices; they go on within their limits" in removed
    assert guest.run(f"cat /proc/{pids[0]}/comm") == "sleep\n"
    left = guest.run(LEFT)
    assert re.fullmatch(rf"({KEPT})+", left), left
    guest.run("apt-get install -y /mnt/current/*.deb 2>&1")
    assert jobs(guest)["alice/train"]["pids"] == pids
    guest.run("apt-get purge -y fenka 2>&1")
    inside = guest.run(
        f"nsenter --target {pids[0]} --user --preserve-credentials --mount cat /etc/ld.so.preload"
    )
    assert "fenka" in inside
    assert guest.run(LEFT) == ""
    assert guest.run("ls /run/fenka 2>&1 || true").startswith("ls: cannot access")
    guest.run(f"kill {shlex.join(map(str, pids))}")


def test_purge_leaves_nothing(guest: Guest) -> None:
    """No file, no process, no mount, no unit. Homes are the users' own."""
    guest.run("fenka run --gpu-mem 4 -- true", "alice")
    guest.run("apt-get purge -y fenka 2>&1")
    assert guest.run(LEFT) == ""
    assert guest.run("grep -E '^fenka|/run/fenka' /proc/self/mounts || true") == ""
    assert guest.run("pgrep -a fenka || true") == ""
    assert "could not be found" in guest.attempt("systemctl status fenka").stderr


@once
def test_daemon_is_replaced_when_python_is(guest: Guest) -> None:
    """Another Python of the distribution's gets compiled modules, and programs go on."""
    pids = start(guest, "alice", "train")
    daemon = guest.run("systemctl show fenka -p MainPID --value")
    guest.run("dpkg-trigger --no-await /usr/bin/python3 && dpkg --triggers-only fenka")
    assert guest.run("systemctl show fenka -p MainPID --value") != daemon
    assert jobs(guest)["alice/train"]["pids"] == pids


def test_mistake_in_the_configuration_ends_the_service(guest: Guest) -> None:
    """It is not started again and again, and its status has the sentence."""
    guest.run("sed -i 's/^simulate.*/simulated = \"T4\"/' /etc/fenka/daemon.toml")
    assert guest.attempt("systemctl restart fenka").returncode
    status = guest.attempt("systemctl status fenka").stdout
    assert "did you mean simulate?" in status
    assert "Active: failed" in status
