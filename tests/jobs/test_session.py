"""What becomes of programs in the background at a logout, by what logind and the service manager answer."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from fenka.hardware.peer_credentials import user_name
from fenka.jobs import processes

USER = user_name(os.getuid())
SCOPE = f"0::/user.slice/user-{os.getuid()}.slice/session-7.scope\n"
MANAGED = f"0::/user.slice/user-{os.getuid()}.slice/user@{os.getuid()}.service/app.slice/x.scope\n"
KILLS = 'b true\nas 1 "somebody"\nas 0\n'
EXCLUDED = f'b true\nas 2 "somebody" "{USER}"\nas 0\n'
OTHERS_ONLY = 'b true\nas 0\nas 1 "somebody"\n'
KEEPS = 'b false\nas 1 "root"\nas 0\n'

Machine = Callable[[str, str, bool], list[tuple[str, ...]]]


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Machine:
    """Return a function that sets control groups, logind's answer and lingering, and returns later calls."""

    def set_up(groups: str, logind: str, lingers: bool) -> list[tuple[str, ...]]:
        calls = list[tuple[str, ...]]()

        def busctl(*words: str) -> str:
            calls.append(words)
            return 'o "/org/freedesktop/systemd1/job/1"' if "--user" in words else logind

        monkeypatch.setattr(processes, "_groups", lambda: groups)
        monkeypatch.setattr(processes, "_busctl", busctl)
        monkeypatch.setattr(processes, "LINGERING", tmp_path)
        if lingers:
            (tmp_path / USER).touch()
        return calls

    return set_up


@pytest.mark.parametrize(
    ("groups", "logind", "lingers", "ends"),
    [
        ("", KILLS, False, False),  # no systemd, as in a container
        ("0::/system.slice/cron.service\n", KILLS, False, False),
        (SCOPE, KEEPS, False, False),
        (SCOPE, EXCLUDED, False, False),
        (SCOPE, OTHERS_ONLY, False, False),
        (SCOPE, "", False, False),  # logind does not answer
        (SCOPE, KILLS, False, True),
        (SCOPE, KILLS, True, False),
        (MANAGED, KEEPS, False, True),
        (MANAGED, KEEPS, True, False),
    ],
)
def test_warning_says_whether_a_program_ends_with_the_session(
    machine: Machine, groups: str, logind: str, lingers: bool, ends: bool
) -> None:
    """It names the command that changes it."""
    machine(groups, logind, lingers)
    assert ("loginctl enable-linger" in processes.outlive(1)) is ends


def test_program_moves_to_the_service_manager_only_where_that_lets_it_go_on(
    machine: Machine,
) -> None:
    """Elsewhere its session may keep it."""
    calls = machine(SCOPE, KILLS, True)
    processes.outlive(4711)
    assert calls[-1][:2] == ("--user", "call")
    assert "4711" in calls[-1]
    calls = machine(SCOPE, KEEPS, True)
    processes.outlive(4711)
    assert "--user" not in calls[-1]
