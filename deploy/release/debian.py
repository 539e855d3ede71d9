"""Debian packages of any processor, fetched by apt and unpacked without running their scripts.

Neither root nor an emulator is needed: apt resolves and verifies, dpkg-deb unpacks.
"""

import io
import re
import tarfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from deploy.release.recipe import Release

SUITE: Final = "trixie"
"""Debian 13, which has security updates until 2028."""
SOURCES: Final = """\
Types: deb
URIs: http://deb.debian.org/debian
Suites: {0} {0}-updates
Components: main
Signed-By: /usr/share/keyrings/debian-archive-keyring.gpg

Types: deb
URIs: http://deb.debian.org/debian-security
Suites: {0}-security
Components: main
Signed-By: /usr/share/keyrings/debian-archive-keyring.gpg
"""
_INSTALLED = re.compile(r"^Inst (\S+) \((\S+) ", re.MULTILINE)
"""What apt prints of a package that it would install: name and version."""


@dataclass(frozen=True, order=True)
class Package:
    """A Debian package: its name, its version, and the downloaded file."""

    name: str
    version: str
    file: Path


class Archive:
    """Debian's archive for one processor, with package lists of its own below a folder.

    Args:
        release: runs the programs.
        architecture: Debian's name of the processor.
        folder: for the lists and the downloads, which a later run uses again.
    """

    def __init__(self, release: Release, architecture: str, folder: Path) -> None:
        self._release = release
        self._downloads = folder / "archives"
        (self._downloads / "partial").mkdir(parents=True, exist_ok=True)
        (folder / "lists" / "partial").mkdir(parents=True, exist_ok=True)
        self._plan = folder / "plan"
        (folder / "empty").mkdir(exist_ok=True)
        (folder / "status").write_text("")
        (folder / "debian.sources").write_text(SOURCES.format(SUITE))
        settings = {
            "APT::Architecture": architecture,
            "APT::Architectures": architecture,
            "APT::Install-Recommends": "false",
            # Another user could not write below the folder.
            "APT::Sandbox::User": "",
            "Debug::NoLocking": "true",
            "Dir::Cache::archives": self._downloads,
            "Dir::Cache::pkgcache": "",
            "Dir::Cache::srcpkgcache": "",
            "Dir::Etc::parts": folder / "empty",
            "Dir::Etc::preferences": folder / "none",
            "Dir::Etc::preferencesparts": folder / "empty",
            "Dir::Etc::sourcelist": folder / "debian.sources",
            "Dir::Etc::sourceparts": folder / "empty",
            "Dir::State::lists": folder / "lists",
            "Dir::State::status": folder / "status",
        }
        self._options = [f"-o{name}={value}" for name, value in settings.items()]

    def fetch(
        self, names: Sequence[str], without: frozenset[str], latest: bool = True
    ) -> list[Package]:
        """Return packages with all that they depend on, sorted by name. Raises ReleaseError.

        Args:
            names: packages.
            without: dependencies that are left out, such as those of the scripts that do not run.
            latest: Whether to fetch the latest ones if an earlier call has fetched the same packages.
        """
        asked = " ".join(names)
        planned, *plan = self._plan.read_text().splitlines() if self._plan.exists() else [""]
        if latest or planned != asked:
            self._apt("update", "--error-on=any")
            simulated = self._apt("install", "--simulate", *names).decode()
            plan = sorted(" ".join(found) for found in _INSTALLED.findall(simulated))
            self._apt("install", "--download-only", *names)
            self._plan.write_text("\n".join([asked, *plan]))
        packages = []
        for name, version in (line.split() for line in plan):
            if name not in without:
                (file,) = self._downloads.glob(f"{name}_{version.replace(':', '%3a')}_*.deb")
                packages.append(Package(name, version, file))
        return packages

    def _apt(self, command: str, *words: str) -> bytes:
        return self._release.run("apt-get", "-qq", "-y", *self._options, command, *words)


def unpack(release: Release, packages: Sequence[Package], root: Path) -> None:
    """Unpack packages into a folder. Their records go where scanners of images look: dpkg's status.d."""
    records = root / "var" / "lib" / "dpkg" / "status.d"
    records.mkdir(parents=True, exist_ok=True)
    # base-files comes first: it has the links of / to the folders of /usr.
    for package in sorted(packages, key=lambda package: (package.name != "base-files", package)):
        content = release.run("dpkg-deb", "--fsys-tarfile", package.file)
        with tarfile.open(fileobj=io.BytesIO(content)) as tar:
            # This filter drops the bits of programs that run as another user.
            tar.extractall(root, filter="tar")
        (records / package.name).write_bytes(release.run("dpkg-deb", "--field", package.file))
