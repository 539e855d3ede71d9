"""Puts the native libraries into the wheel, and marks the wheel as one for their processor.

FENKA_WHEEL_NATIVE names the folder of the libraries; by default it is `src/fenka/_native`. With the value
`none` the wheel has no libraries and installs everywhere: its commands can look at clusters, and start no
programs.
Without that variable an unpacked sdist builds the libraries on Linux, and has none elsewhere.
FENKA_WHEEL_SHARE names a folder of man pages and completions, laid out as `share`.
"""

import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

PROCESSORS = {62: "x86_64", 183: "aarch64"}
"""Values of ELF's e_machine."""


class NativeWheel(BuildHookInterface[Any]):
    """An editable install builds the libraries later, by `make build`; a wheel must have them."""

    def dependencies(self) -> list[str]:
        """Return the compiler and the headers if this build compiles: the group `native`."""
        if not self._compiles():
            return []
        groups: dict[str, list[str]] = self.metadata.config["dependency-groups"]
        return [*groups["native"], "cffi>=2.0"]

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Raises FileNotFoundError without page or libraries, RuntimeError if these cannot be built."""
        if version == "editable":
            return
        page = Path(self.root) / "src" / "fenka" / "_web" / "index.html"
        if not page.exists():
            raise FileNotFoundError(f"{page} is missing: run `make web` before building a wheel")
        if share := os.environ.get("FENKA_WHEEL_SHARE"):
            build_data["shared_data"][share] = "share"
        libraries = self._libraries()
        if libraries is None:
            return
        shim = libraries / "libfenka.so"
        if not shim.exists():
            raise FileNotFoundError(f"{shim} is missing: run `make build` before building a wheel")
        build_data["pure_python"] = False
        # The libraries need nothing newer than glibc 2.17, and nothing of Python.
        build_data["tag"] = f"py3-none-manylinux_2_17_{_processor(shim)}"
        for path in sorted(libraries.rglob("*")):
            if path.is_file():
                build_data["force_include"][str(path)] = (
                    f"fenka/_native/{path.relative_to(libraries)}"
                )

    def _compiles(self) -> bool:
        """Return whether this is an unpacked sdist on Linux, which has sources of the libraries only."""
        unpacked = (Path(self.root) / "PKG-INFO").exists()
        return unpacked and sys.platform == "linux" and "FENKA_WHEEL_NATIVE" not in os.environ

    def _libraries(self) -> Path | None:
        named = os.environ.get("FENKA_WHEEL_NATIVE")
        if named == "none" or (not named and sys.platform != "linux"):
            return None
        built = Path(self.root) / "src" / "fenka" / "_native"
        if self._compiles():
            native = str(Path(self.root) / "native")
            command = ["make", "-C", native, f"PYTHON={sys.executable}", "DEBUG=-g0"]
            try:
                subprocess.run(command, check=True)
            except (FileNotFoundError, subprocess.CalledProcessError) as error:
                raise RuntimeError(
                    f"the native libraries could not be built ({error}). Install a wheel, or `make`; "
                    "FENKA_WHEEL_NATIVE=none installs the commands that look at clusters only"
                ) from None
        return Path(named) if named else built


def _processor(library: Path) -> str:
    """Return Linux' name of the processor that a library is for."""
    machine = int.from_bytes(library.read_bytes()[18:20], "little")
    return PROCESSORS.get(machine, platform.machine())
