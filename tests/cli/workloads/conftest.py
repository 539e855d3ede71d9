"""What tests of commands about training jobs share."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.cli.command import Completed, fenka
from tests.fakes.api_server import FakeApiServer, in_thread

Run = Callable[..., Completed]


@pytest.fixture(autouse=True)
def a_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A user who has chosen no layout, and has neither a daemon nor a kubeconfig."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("FENKA_RUNTIME", str(tmp_path / "no-daemon"))
    monkeypatch.delenv("FENKA_LAYOUT", raising=False)
    monkeypatch.delenv("KUBECONFIG", raising=False)


@pytest.fixture
def server() -> FakeApiServer:
    """Return a server without objects; tests put them there."""
    return FakeApiServer()


@pytest.fixture
def run(server: FakeApiServer, tmp_path: Path) -> Iterator[Run]:
    """Return what runs a command with a kubeconfig that leads to the server, in namespace default."""
    with in_thread(server, tmp_path) as kubeconfig:

        def command(*words: str) -> Completed:
            verbs = 2 if words[0] in ("top", "submit") else 1
            options = ("--kubeconfig", str(kubeconfig), "-n", "default")
            return fenka(*words[:verbs], *options, *words[verbs:])

        yield command
