"""What the daemon writes into its log."""

import pytest

from fenka.workstation.lifetime import log


def test_log_escapes_what_a_terminal_would_execute(capsys: pytest.CaptureFixture[str]) -> None:
    """Names and annotations are users'. A line stays one line."""
    log("a container of \x1b]0;x\x07 gets\nnothing, ä")
    assert (
        capsys.readouterr().err == "fenka daemon: a container of \\x1b]0;x\\x07 gets nothing, ä\n"
    )
