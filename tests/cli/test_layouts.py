"""The layout of all screens: option, environment, file, in this order."""

from pathlib import Path

import pytest

from fenka.cli.error_report import UserError
from fenka.cli.screen_layouts import CONFIGURATION, uses_arena


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return where the user's configuration is; nothing is there."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("FENKA_LAYOUT", raising=False)
    path = tmp_path / CONFIGURATION
    path.parent.mkdir(parents=True)
    return path


def test_layout_is_the_articles_by_default(file: Path) -> None:
    """Without a file, with an empty one, and by either of its names."""
    assert not uses_arena(None)
    file.write_text("")
    assert not uses_arena(None)
    assert not uses_arena("old")
    assert uses_arena("arena")


def test_layout_is_the_default_when_the_user_has_no_home(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a container with a user of its own."""
    monkeypatch.delenv("FENKA_LAYOUT", raising=False)
    monkeypatch.setenv("HOME", "/dev/null")
    assert not uses_arena(None)

    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", homeless)
    assert not uses_arena(None)


def test_option_precedes_environment_precedes_file(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The nearest one counts."""
    file.write_text('layout = "arena"\n')
    assert uses_arena(None)
    monkeypatch.setenv("FENKA_LAYOUT", "fenka")
    assert not uses_arena(None)
    monkeypatch.setenv("FENKA_LAYOUT", "arena")
    assert not uses_arena("fenka")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ('layout = "new"', "invalid layout in"),
        ("layout = 3", "invalid layout in"),
        ('color = "red"', "unknown setting 'color' in"),
        ("layout =", "cannot be read"),
    ],
)
def test_file_that_makes_no_sense_is_an_error_that_names_it(
    file: Path, text: str, reason: str
) -> None:
    """Nothing is guessed."""
    file.write_text(text)
    with pytest.raises(UserError, match=reason) as error:
        uses_arena(None)
    assert str(file) in str(error.value)


def test_environment_that_makes_no_sense_is_an_error(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It names the layouts."""
    monkeypatch.setenv("FENKA_LAYOUT", "new")
    with pytest.raises(UserError, match="invalid FENKA_LAYOUT: 'new' is none of fenka, old, arena"):
        uses_arena(None)
