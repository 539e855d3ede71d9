"""Logins and logouts where root runs no daemon: each user has one, with a directory of the session's."""

import json
import re
import subprocess
from collections.abc import Iterator

import pytest

from vm.guest import Guest, GuestError
from vm.test_package import PS, jobs, listed

NIGHT = "fenka run --gpu-mem 5 -d --name night -- sleep 30000"
SIMULATE = """\
mkdir -p ~/.config/fenka
echo 'simulate = "T4"' > ~/.config/fenka/daemon.toml
"""
AGEING = """\
printf 'q /tmp 1777 root root 2s\\n' > /etc/tmpfiles.d/tmp.conf
touch /tmp/old
until find /tmp/old -cmin +0.05 | grep --quiet .; do sleep 0.5; done
systemd-tmpfiles --clean
"""


@pytest.fixture
def desk(guest: Guest) -> Guest:
    """Return a machine without a daemon of root's."""
    guest.run("systemctl disable --now fenka 2>/dev/null; mv /etc/fenka/daemon.toml /root/")
    guest.run(SIMULATE, "alice")
    return guest


@pytest.fixture
def session(desk: Guest) -> Iterator[subprocess.Popen[bytes]]:
    """Return a session of alice's that lasts until its standard input ends."""
    with subprocess.Popen([*desk.login("alice"), "cat"], stdin=subprocess.PIPE) as process:
        desk.until("ls /run/user", lambda text: "1000" in text)
        yield process


def configure_logind(guest: Guest, *settings: str) -> None:
    """Let logind remove a user's directory at once, and give it other settings."""
    text = "\n".join(("[Login]", "UserStopDelaySec=0", *settings))
    guest.run(
        f"mkdir -p /etc/systemd/logind.conf.d; echo '{text}' > /etc/systemd/logind.conf.d/lab.conf; "
        "systemctl restart systemd-logind"
    )


def logged_out(guest: Guest) -> None:
    """Wait until alice has no session."""
    guest.until("loginctl list-users --no-legend", lambda text: "alice" not in text)


def running(guest: Guest) -> list[str]:
    """Return the names of alice's jobs."""
    return [job["name"] for job in json.loads(guest.run("fenka ps -o json", "alice"))]


def test_program_goes_on_after_the_logout_when_logind_lets_it(desk: Guest) -> None:
    """So Debian's logind does. The next login finds it."""
    desk.run(NIGHT, "alice")
    assert running(desk) == ["night"]
    assert desk.run("fenka run --gpu-mem 9 --no-wait -- echo fits", "alice") == "fits\n"


def test_program_ends_with_the_session_when_logind_kills(desk: Guest) -> None:
    """`fenka run` says so when it starts, and the next login can start others."""
    configure_logind(desk, "KillUserProcesses=yes")
    started = desk.attempt(NIGHT, "alice")
    assert "night ends when you log out" in started.stderr
    desk.until("pgrep -u alice -x sleep || echo none", lambda text: "none" in text)
    logged_out(desk)
    assert desk.run("fenka run --gpu-mem 14 --no-wait -- echo free", "alice") == "free\n"


def test_program_goes_on_when_its_user_lingers(desk: Guest) -> None:
    """loginctl enable-linger: daemon and program move out of the session that is killed."""
    configure_logind(desk, "KillUserProcesses=yes")
    desk.run("loginctl enable-linger alice")
    desk.run(NIGHT, "alice")
    desk.until("loginctl list-sessions --no-legend", lambda text: "alice" not in text)
    desk.until("fenka ps -o json", lambda text: '"night"' in text, "alice")


def test_logout_frees_the_slices_of_who_does_not_linger(guest: Guest) -> None:
    """root's daemon has the programs of two users, and logind kills those of one."""
    configure_logind(guest, "KillUserProcesses=yes")
    guest.run("loginctl enable-linger alice")
    assert "log out" not in guest.attempt(NIGHT, "alice").stderr
    assert "night ends when you log out" in guest.attempt(NIGHT, "bob").stderr
    guest.until(PS, lambda text: set(listed(text)) == {"alice/night"})
    assert guest.run("fenka run --gpu-mem 9 --no-wait -- echo free", "bob") == "free\n"
    assert jobs(guest)["alice/night"]["pids"]


def test_daemon_outside_of_the_session_is_found_at_the_next_login(
    desk: Guest, session: subprocess.Popen[bytes]
) -> None:
    """cron's, or a unit's: its directory goes at the logout under it, and it makes one again."""
    configure_logind(desk)
    desk.run(
        "systemd-run --quiet --uid=alice --unit=outside -E XDG_RUNTIME_DIR=/run/user/1000 "
        f"-E HOME=/home/alice sh -c '{NIGHT}; exec sleep 40000'"
    )
    desk.until("ls /run/user/1000/fenka/leases", lambda text: re.search(r"^\w{8}$", text))
    assert session.stdin is not None
    session.stdin.close()
    desk.until("ls /run/user", lambda text: "1000" not in text)
    assert running(desk) == ["night"]
    refused = desk.attempt("fenka run --gpu-mem 10 --no-wait -- true", "alice")
    assert refused.stderr == "fenka: no GPU fits: 1 of 1 has too little memory\n"


def test_directory_in_tmp_is_kept_when_systemd_tmpfiles_cleans(desk: Guest) -> None:
    """It is used where a user has no session, and is older than what is kept in /tmp."""
    without = "unset XDG_RUNTIME_DIR; cd; "
    desk.run(f"{without}{NIGHT}", "alice")
    files = desk.run("find /tmp/fenka-1000 | sort")
    desk.run(AGEING)
    assert desk.run("find /tmp/fenka-1000 | sort") == files
    with pytest.raises(GuestError):
        desk.run("ls /tmp/old")
    ran = desk.run(f"{without}fenka run --gpu-mem 5 --no-wait -- echo fits", "alice")
    assert ran == "fits\n"
