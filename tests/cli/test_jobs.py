"""`fenka logs` of jobs that have left no log here."""

import os
from pathlib import Path

import pytest

from fenka.workstation import client
from fenka.workstation.protocol import MachineSnapshot
from tests.cli.command import Completed, fenka
from tests.cli.test_queue import job, snapshot_of


@pytest.mark.parametrize(
    ("uid", "sentence"),
    [
        (os.geteuid() + 1, "job night is ann's: only ann can use it"),
        (
            os.geteuid(),
            "night prints to the terminal that it was started from: only --detach keeps a log",
        ),
    ],
)
def test_owner_is_named_when_a_log_is_another_users(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, uid: int, sentence: str
) -> None:
    """A training of another user is a gang in the daemon's answer, with its log in his directory."""

    def get_snapshot(_runtime: object) -> MachineSnapshot:
        return snapshot_of([job("night/0", None, uid=uid, gang="night", rank=0)])

    monkeypatch.setenv("FENKA_RUNTIME", str(tmp_path))
    monkeypatch.setattr(client, "get_snapshot", get_snapshot)
    assert fenka("logs", "--local", "night") == Completed(1, "", f"fenka: {sentence}\n")
