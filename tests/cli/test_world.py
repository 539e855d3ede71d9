"""Which of two worlds a command is about: this machine, or the kubeconfig's cluster."""

from pathlib import Path

import pytest

from fenka.cli import world
from fenka.cli.common_options import Target
from fenka.cli.error_report import UserError
from fenka.cli.workloads.arguments import JobTarget
from fenka.cli.world import runs_here
from fenka.workstation.paths import Runtime

HERE = "# this machine; --cluster or FENKA_WORLD=cluster shows the kubeconfig's cluster\n"
CLUSTER = "# the kubeconfig's cluster; --local or FENKA_WORLD=machine shows this machine\n"


@pytest.fixture(autouse=True)
def terminal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A terminal, a daemon that answers and a kubeconfig."""
    (tmp_path / "config").touch()
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "config"))
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    monkeypatch.delenv("FENKA_WORLD", raising=False)
    monkeypatch.setattr(Runtime, "answers", lambda _: True)
    monkeypatch.setattr(world, "_on_terminal", lambda: True)


def announced(
    capsys: pytest.CaptureFixture[str], target: Target | None = None, *, here: bool = True
) -> str:
    """Return what is printed before a screen."""
    world.announce(target or Target(), here=here)
    return capsys.readouterr().err


def test_first_line_names_the_world_where_both_are_there(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It says how to see the other one."""
    assert announced(capsys) == HERE
    assert announced(capsys, here=False) == CLUSTER
    monkeypatch.setattr(Runtime, "answers", lambda _: False)
    assert announced(capsys, here=False) == ""
    monkeypatch.setenv("KUBECONFIG", "/nonexistent")
    assert announced(capsys) == ""


def test_no_line_is_printed_where_the_world_was_selected_or_a_program_reads(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An option or the variable selects it."""
    assert announced(capsys, Target(local=True)) == ""
    assert announced(capsys, Target(cluster=True), here=False) == ""
    monkeypatch.setenv("FENKA_WORLD", "cluster")
    assert announced(capsys, here=False) == ""
    monkeypatch.delenv("FENKA_WORLD")
    monkeypatch.setattr(world, "_on_terminal", lambda: False)
    assert announced(capsys) == ""


def test_variable_selects_the_world_where_no_option_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """Options have precedence."""
    monkeypatch.setenv("FENKA_WORLD", "cluster")
    assert Target().of_cluster
    assert not Target(local=True).of_cluster
    assert not runs_here(JobTarget())
    monkeypatch.setenv("FENKA_WORLD", "machine")
    assert Target().local
    assert runs_here(JobTarget())
    assert Target(context="c").of_cluster
    monkeypatch.setenv("FENKA_WORLD", "moon")
    with pytest.raises(UserError, match="FENKA_WORLD is cluster or machine, not moon"):
        Target()
