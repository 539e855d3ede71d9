"""What others have written reaches nobody's terminal as a command."""

import io
import json
import os

import pytest

from fenka.cli import error_report, tables

HOSTILE = "a\x1b]0;title\x07\x9b2J\u202eb\u2028\ud800\tc\nd"
SHOWN = r"a\x1b]0;title\x07\x9b2J\u202eb\u2028\ud800\tc\nd"


def test_escape_replaces_unprintable_characters() -> None:
    """Control characters, those that turn the line round, and line ends; other languages stay."""
    assert tables.escape(HOSTILE) == SHOWN
    assert tables.escape("köln 東京 €") == "köln 東京 €"
    assert tables.escape(tables.escape(HOSTILE)) == SHOWN


def test_align_counts_the_escaped_text() -> None:
    """The escaped text counts."""
    assert tables.align([("N", "X"), ("\x1b", "y")]) == ["N     X", r"\x1b  y"]
    assert tables.align_tabs(["N\tX", "\x1b\ty"]) == ["N     X", r"\x1b  y"]


class Terminal(io.StringIO):
    """A terminal."""

    def isatty(self) -> bool:
        """Return that it is one."""
        return True


@pytest.mark.parametrize(
    ("width", "lines"),
    [
        (17, ["NAME  B   C  STATE", "n     bb  c  in use"]),
        (19, ["NAME  B   C  STATE", "n     bb  c  in use"]),
        (18, ["NAME  C  STATE", "n     c  in use"]),
        (14, ["NAME  STATE", "n     in use"]),
        (11, ["NAME  STATE", "n     in u…"]),
    ],
)
def test_columns_are_left_out_when_the_terminal_is_narrow(
    width: int, lines: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The least important first; then lines are truncated. Anything but a terminal gets all."""
    monkeypatch.setattr("sys.stdout", io.StringIO() if width == 17 else Terminal())
    monkeypatch.setattr("shutil.get_terminal_size", lambda *_, **__: os.terminal_size((width, 24)))
    rows = [("NAME", "B", "C", "STATE"), ("n", "bb", "c", "in use")]
    assert tables.align_to_terminal(rows, ("B", "C")) == lines


def test_print_lines_and_print_error_escape_their_text(capsys: pytest.CaptureFixture[str]) -> None:
    """Whatever prints them."""
    tables.print_lines(["fine", HOSTILE])
    error_report.print_error(HOSTILE)
    out, err = capsys.readouterr()
    assert out == f"fine\n{SHOWN}\n"
    assert err == f"fenka: {SHOWN}\n"


def test_json_text_keeps_the_data_when_it_escapes(capsys: pytest.CaptureFixture[str]) -> None:
    """Escaped as JSON does it, so that a program reads what was written."""
    data = {"name": HOSTILE.replace("\ud800", "")}
    assert tables.print_data(data, "json")
    out = capsys.readouterr().out
    assert json.loads(out) == data
    assert out.replace("\n", "").isprintable()
