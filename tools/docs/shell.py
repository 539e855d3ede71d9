"""A shell for the command blocks of one page."""

import contextlib
import json
import os
import queue
import shlex
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from tools.docs.blocks import PageError

TIMEOUT_S = 240.0
"""The limit of one command. It costs a command that ends nothing."""

TIMES = "FENKA_DOCS_TIMES"
"""Environment variable: a file to which the time of each command is appended, for tools/newcomer.py."""
SLOW_TIMEOUT_S = 600.0
"""The limit of one command whose time is measured."""


@contextlib.contextmanager
def timed(command: str) -> Iterator[None]:
    """Append a command and its seconds to the file that TIMES names, if it does."""
    start = time.monotonic()
    yield
    if file := os.environ.get(TIMES):
        row = {"command": command.strip(), "seconds": time.monotonic() - start}
        with Path(file).open("a") as times:
            times.write(f"{json.dumps(row)}\n")


class Shell:
    """One bash for a page: variables, functions and the directory stay from block to block.

    Commands read no input. Programs in the background keep running until the session ends.
    """

    def __init__(
        self,
        directory: Path,
        environment: Mapping[str, str],
        prefix: Sequence[str] = (),
        *,
        shared: bool = False,
    ) -> None:
        """Start bash.

        Args:
            directory: The working directory.
            environment: All variables.
            prefix: A command that starts the bash which follows it, for example as another user.
            shared: Another user writes the output of commands, below /tmp.
        """
        self.directory = directory
        self._count = self._code = 0
        self._scripts = tempfile.TemporaryDirectory(prefix="fenka-blocks-")
        if shared:
            Path(self._scripts.name).chmod(0o777)
        self._process = subprocess.Popen(
            [*prefix, "bash", "--noprofile", "--norc"],
            cwd=directory,
            env=dict(environment),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self._codes = queue.SimpleQueue[str]()
        threading.Thread(target=self._read_codes, daemon=True).start()

    def run(self, script: str) -> tuple[int, str]:
        """Run commands until the first that fails.

        Returns:
            The exit code, and the output of both kinds in one text.

        Raises:
            PageError: They take longer than TIMEOUT_S, or ended the shell.
        """
        self._count += 1
        file = Path(self._scripts.name) / f"{self._count}.sh"
        output = file.with_suffix(".out")
        if script.strip() == "echo $?":
            script = f"echo {self._code}"
        # The trap ends the script, not the shell, at the first command that fails.
        file.write_text(f"trap 'return $?' ERR\n{script}\n")
        source = f". {shlex.quote(str(file))} </dev/null >{shlex.quote(str(output))} 2>&1"
        assert self._process.stdin
        limit = SLOW_TIMEOUT_S if TIMES in os.environ else TIMEOUT_S
        self._process.stdin.write(f"{source}\n_code=$?; trap - ERR; echo $_code\n")
        self._process.stdin.flush()
        try:
            with timed(script):
                code = self._codes.get(timeout=limit)
        except queue.Empty:
            raise PageError(f"no end after {limit:.0f} s:\n{script}\n{_read(output)}") from None
        if not code:
            raise PageError(f"the shell has ended:\n{script}\n{_read(output)}")
        self._code = int(code)
        return self._code, _read(output)

    def write(self, name: str, text: str) -> None:
        """Write a file below the session's first directory."""
        path = self.directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def apply(self, manifest: str) -> None:
        """Raise PageError: without a cluster there is nothing to apply it to."""
        raise PageError(f"no cluster to apply this to:\n{manifest}")

    def shown(self, text: str) -> str:
        """Return the text: a workstation shows a reader's own names."""
        return text

    def close(self) -> None:
        """End the shell and all programs that it started in its session."""
        if self._process.stdin:
            self._process.stdin.close()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGTERM)
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        self._scripts.cleanup()

    def __enter__(self) -> Self:
        """Return the shell."""
        return self

    def __exit__(
        self,
        _: type[BaseException] | None,
        __: BaseException | None,
        ___: TracebackType | None,
    ) -> None:
        """End the shell."""
        self.close()

    def _read_codes(self) -> None:
        assert self._process.stdout
        for line in self._process.stdout:
            self._codes.put(line.strip())
        self._codes.put("")


def _read(file: Path) -> str:
    return file.read_text(errors="replace") if file.exists() else ""
