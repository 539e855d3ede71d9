"""`fenka demo`: what it leaves behind. tests/workstation/test_starts.py runs all of it."""

import contextlib
import signal
import tempfile
from pathlib import Path

import pytest

from fenka.cli import demo


def test_directory_is_removed_when_the_demo_is_interrupted_while_it_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The signal comes after the directory is there, and before anything else knows of it."""

    def interrupted(*words: str) -> str:
        made = mkdtemp(*words)
        signal.raise_signal(signal.SIGINT)
        return made

    mkdtemp = tempfile.mkdtemp
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(tempfile, "mkdtemp", interrupted)
    with pytest.raises(KeyboardInterrupt), contextlib.ExitStack() as stack:
        demo._temporary_directory(stack)
    assert list(tmp_path.iterdir()) == []
