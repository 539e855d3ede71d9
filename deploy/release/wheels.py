"""Wheels for Linux on each processor, a wheel without native libraries for everything else, and the sdist."""

from pathlib import Path

from deploy.release.pages import build_pages
from deploy.release.recipe import ROOT, Release


def build_wheels(release: Release) -> list[Path]:
    """Build a wheel for each processor, and the wheel `any`. Raises ReleaseError."""
    if not release.share.exists():
        build_pages(release)
    for processor in release.processors:
        _wheel(release, str(release.native(processor)))
    _wheel(release, "none")
    return [release.wheel(processor) for processor in (*release.processors, "any")]


def _wheel(release: Release, libraries: str) -> None:
    """Build a wheel with the libraries of this folder."""
    release.uv(
        *("build", "--quiet", "--wheel", "--out-dir", release.into, ROOT),
        environment={"FENKA_WHEEL_NATIVE": libraries, "FENKA_WHEEL_SHARE": str(release.share)},
    )


def build_sdist(release: Release) -> list[Path]:
    """Build the source distribution. Raises ReleaseError."""
    release.uv("build", "--quiet", "--sdist", "--out-dir", release.into, ROOT)
    return [release.into / f"fenka-{release.version}.tar.gz"]
