"""A release that is being made: its version, processors and folders, and how it calls programs."""

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Final

from deploy.release.version import current_version

ROOT: Final = Path(__file__).parents[2]
DOWNLOADS: Final = "https://releases.example.com/fenka"
"""Where releases are published, for whoever does not set FENKA_RELEASE_URL."""

PROCESSORS: Final = {"x86_64": "amd64", "aarch64": "arm64"}
"""Linux' and Python's names of processors, and those of Debian, of OCI images and of krew."""


class ReleaseError(Exception):
    """A release could not be made; the text is a sentence."""


@dataclass(frozen=True)
class Release:
    """A release that is being made.

    Attributes:
        into: Folder of the artifacts.
        processors: Processors that programs are built for, by Linux' names.
        work: Folder of what is built on the way. It may hold results of an earlier run.
    """

    into: Path
    processors: Sequence[str] = tuple(PROCESSORS)
    work: Path = field(default=ROOT / "native" / "build" / "release")

    @cached_property
    def version(self) -> str:
        """The version in `src/fenka/__init__.py`."""
        return current_version(ROOT)

    @cached_property
    def epoch(self) -> int:
        """Time of everything in archives, in seconds since 1970, so that two builds have the same bytes.

        SOURCE_DATE_EPOCH, or else the time of the last commit. A copy without git has 2020's first second.
        """
        given = os.environ.get("SOURCE_DATE_EPOCH", "")
        if given.isdigit():
            return int(given)
        command = ["git", "-C", str(ROOT), "log", "-1", "--format=%ct"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        return int(done.stdout) if done.returncode == 0 else 1577836800

    @property
    def download_url(self) -> str:
        """Where the files of this release are, without a slash at the end."""
        base = os.environ.get("FENKA_RELEASE_URL", DOWNLOADS)
        return f"{base.rstrip('/')}/v{self.version}"

    @property
    def share(self) -> Path:
        """The folder in which the step `pages` leaves man pages and completions, laid out as /usr/share."""
        return self.work / "share"

    def wheel(self, processor: str) -> Path:
        """Return the path of the wheel for a processor. `any` is the wheel without native libraries."""
        tag = "any" if processor == "any" else f"manylinux_2_17_{processor}"
        return self.into / f"fenka-{self.version}-py3-none-{tag}.whl"

    def run(
        self,
        *command: str | Path,
        environment: Mapping[str, str] | None = None,
        folder: Path = ROOT,
        data: bytes | None = None,
    ) -> bytes:
        """Run a program, and return its output. Raises ReleaseError with the end of what it printed."""
        words = [str(word) for word in command]
        variables = {**os.environ, "SOURCE_DATE_EPOCH": str(self.epoch), **(environment or {})}
        try:
            done = subprocess.run(
                words, cwd=folder, env=variables, input=data, capture_output=True, check=False
            )
        except FileNotFoundError as error:
            raise ReleaseError(f"`{words[0]}` is not installed: {error}") from None
        if done.returncode:
            printed = (done.stdout + done.stderr).decode(errors="replace").strip()
            raise ReleaseError(f"`{' '.join(words)}` failed: {printed[-2000:]}")
        return done.stdout

    def uv(self, *words: str | Path, environment: Mapping[str, str] | None = None) -> bytes:
        """Run the checkout's uv, which `make build` installs. Raises ReleaseError."""
        return self.run(ROOT / ".tools" / "bin" / "uv", *words, environment=environment)

    def native(self, processor: str) -> Path:
        """Build the native libraries for a processor, and return their folder. Raises ReleaseError."""
        libraries = self.work / processor / "_native"
        self.run(
            *("make", "--no-print-directory", "-C", ROOT / "native", f"ARCH={processor}"),
            *(f"OUT={libraries}", f"BUILD={self.work / processor / 'build'}"),
            *(f"PYTHON={sys.executable}", "DEBUG=-g0"),
        )
        return libraries
