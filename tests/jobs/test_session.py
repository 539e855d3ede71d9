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
MOVED = MANAGED.replace("x.scope", "fenka-{}.scope")
KILLS = 'b true\nas 1 "somebody"\nas 0\n'
EXCLUDED = f'b true\nas 2 "somebody" "{USER}"\nas 0\n'
OTHERS_ONLY = 'b true\nas 0\nas 1 "somebody"\n'
KEEPS = 'b false\nas 1 "root"\nas 0\n'

Machine = Callable[[str, str, bool], list[tuple[str, ...]]]


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Machine:
    """Return a function that sets control groups, logind's answer and lingering, and returns later calls.

    As the real one, the service manager answers before it moves the process.
    """

    def set_up(groups: str, logind: str, lingers: bool) -> list[tuple[str, ...]]:
        calls = list[tuple[str, ...]]()
        later = iter([groups, groups])

        def busctl(*words: str) -> str:
            calls.append(words)
            return 'o "/org/freedesktop/systemd1/job/1"' if "--user" in words else logind

        def groups_of(pid: int | str = "self") -> str:
            calls.append(("groups", str(pid)))
            return groups if pid == "self" else next(later, MOVED.format(pid))

        monkeypatch.setattr(processes, "_groups", groups_of)
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


def test_program_starts_when_it_has_moved(machine: Machine) -> None:
    """Children that it starts before stay in the session, and end with it."""
    calls = machine(SCOPE, KILLS, True)
    assert processes.outlive(4711) == ""
    assert calls[-3:] == [("groups", "4711")] * 3


def test_warning_says_so_when_the_program_does_not_move(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The service manager has a time limit."""
    machine(SCOPE, KILLS, True)
    monkeypatch.setattr(processes, "_BUS_TIMEOUT_S", -1.0)
    assert "enable-linger" in processes.outlive(4711)


def test_program_moves_to_the_service_manager_only_where_that_lets_it_go_on(
    machine: Machine,
) -> None:
    """Elsewhere its session may keep it."""
    calls = machine(SCOPE, KILLS, True)
    processes.outlive(4711)
    moves = [words for words in calls if words[:2] == ("--user", "call")]
    assert [words[7] for words in moves] == ["fenka-4711.scope"]
    calls = machine(SCOPE, KEEPS, True)
    processes.outlive(4711)
    assert not any("--user" in words for words in calls)
