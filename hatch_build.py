"""Marks the wheel as one for this kind of machine: it carries the native libraries."""

import platform
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class NativeWheel(BuildHookInterface[Any]):
    """An editable install builds them later, by `make build`; a wheel must have them."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Raises FileNotFoundError for a wheel without the libraries."""
        if version == "editable":
            return
        shim = Path(self.root) / "src" / "fenka" / "_native" / "libfenka.so"
        if not shim.exists():
            raise FileNotFoundError(f"{shim} is missing: run `make build` before building a wheel")
        build_data["pure_python"] = False
        # The libraries need nothing newer than glibc 2.17, and nothing of Python.
        build_data["tag"] = f"py3-none-manylinux_2_17_{platform.machine()}"
