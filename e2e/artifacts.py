"""What a release publishes, built from this checkout: the wheel, the packaged chart and the image.

The tests install these, not the checkout. Each is in the cache, keyed by the hash of its sources: its path is
known before it is built, by `python -m e2e build`.
"""

import functools
import os
import platform
import shutil
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from deploy.release import image, packaged_chart, wheels
from deploy.release.recipe import Release
from e2e.image_files import archive, hash_of, run_checked
from e2e.programs import COMPLETE, cache, keep_latest
from e2e.supervisor import REPOSITORY
from tests.skew.last_release import last_release_tree

FENKA = "localhost/fenka:e2e"
LAST_FENKA = "localhost/fenka:last"
BUILT = frozenset({"__pycache__", "_native", "_web", "build", "node_modules"})
LOCKED = (REPOSITORY / "pyproject.toml", REPOSITORY / "uv.lock")
RECIPE = (
    *(REPOSITORY / "deploy" / "release" / f"{name}.py" for name in image.RECIPES),
    REPOSITORY / "uv.lock",
)
"""The files on which an image depends, beside its wheel."""


def release(into: Path) -> Release:
    """Return the release whose artifacts are written to a folder, for this machine's processor."""
    return Release(into, (platform.machine(),), cache() / "release")


def sources(folder: Path) -> list[Path]:
    """Return the files below a folder, sorted, without those that are built."""
    found = (path for path in folder.rglob("*") if BUILT.isdisjoint(path.parts))
    return sorted(path for path in found if path.is_file())


def tree_hash(*parts: Path) -> str:
    """Return a hash of files, and of the files below folders with their paths."""
    files = [path for part in parts for path in (sources(part) if part.is_dir() else [part])]
    return hash_of("\n".join(str(path.relative_to(REPOSITORY)) for path in files), *files)


@functools.cache
def wheel_folder() -> Path:
    """Return the folder of the wheel."""
    parts = [REPOSITORY / name for name in ("src", "native", "web", "hatch_build.py")]
    return cache() / f"wheel-{tree_hash(*parts, *LOCKED)}"


@functools.cache
def chart_folder() -> Path:
    """Return the folder of the packaged chart."""
    recipe = [
        REPOSITORY / "deploy" / "release" / name for name in ("packaged_chart.py", "layout.py")
    ]
    pinned = [REPOSITORY / "e2e" / "jobset" / name for name in ("go.mod", "go.sum")]
    return cache() / f"chart-{tree_hash(packaged_chart.CHART, *recipe, *pinned)}"


CHART = chart_folder() / f"fenka-{release(Path()).version}.tgz"
"""The packaged chart, which contains JobSet's."""
CHART_FILES = chart_folder() / "fenka" / "files"
"""The folder files/ of the packaged chart, unpacked."""
COMMANDS = wheel_folder() / "bin"
"""The commands of the wheel, in a virtual environment without this checkout."""


def build_folder(folder: Path, make: Callable[[Path], None]) -> Path:
    """Return a folder of the cache, which `make` fills if it is missing."""
    if not (folder / COMPLETE).exists():
        began = time.monotonic()
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        make(folder)
        (folder / COMPLETE).touch()
        print(f"made {folder.name} in {time.monotonic() - began:.1f} s", flush=True)
    os.utime(folder)
    kind = folder.name.rpartition("-")[0]
    keep_latest(cache().glob(f"{kind}-*"))
    return folder


def chart() -> Path:
    """Return the packaged chart; build it if it is missing."""

    def make(folder: Path) -> None:
        (packed,) = packaged_chart.package_chart(release(folder))
        with tarfile.open(packed) as tar:
            tar.extractall(folder, filter="data")

    build_folder(chart_folder(), make)
    return CHART


def wheel() -> Path:
    """Return the wheel; build it, and install its commands into COMMANDS, if it is missing."""

    def make(folder: Path) -> None:
        made = release(folder)
        made.run("make", "--no-print-directory", "-C", REPOSITORY / "native")
        made.run("make", "--no-print-directory", "-C", REPOSITORY, "web")
        with tempfile.TemporaryDirectory() as built:
            made.uv("build", "--quiet", "--wheel", "--out-dir", built, REPOSITORY)
            (packed,) = Path(built).glob("*.whl")
            shutil.copy(packed, folder)
        python = folder / "bin" / "python"
        made.uv("venv", "--quiet", "--allow-existing", "--python", sys.executable, folder)
        made.uv("pip", "install", "--quiet", "--no-deps", "--python", python, folder / packed.name)
        (site,) = folder.glob("lib/python*/site-packages")
        (shared,) = dependencies().glob("lib/python*/site-packages")
        (site / "dependencies.pth").write_text(f"import site; site.addsitedir({str(shared)!r})\n")
        run_checked([str(python), "-m", "compileall", "-q", str(site / "fenka")])

    (path,) = build_folder(wheel_folder(), make).glob("*.whl")
    return path


def dependencies() -> Path:
    """Return a virtual environment with the locked dependencies of all extras."""

    def make(folder: Path) -> None:
        made = release(folder)
        export = ("export", "--quiet", "--frozen", "--no-emit-project", "--no-header")
        locked = folder / "requirements.txt"
        locked.write_bytes(made.uv(*export, "--all-extras", "--no-default-groups"))
        made.uv("venv", "--quiet", "--allow-existing", "--python", sys.executable, folder)
        install = ("pip", "install", "--quiet", "--no-deps", "--compile-bytecode")
        python = folder / "bin" / "python"
        # Links cost no space; uv copies if the cache is on another disk.
        linked = {"UV_LINK_MODE": "hardlink"}
        made.uv(*install, "--python", python, "-r", locked, environment=linked)

    return build_folder(
        cache() / f"dependencies-{hash_of(platform.python_version(), LOCKED[1])}", make
    )


def _packed(kind: str, key: str, name: str, wheel_of: Callable[[Release], Path]) -> Path:
    """Return the archive of an image for this machine's processor; build it if it is missing.

    Args:
        kind: the archive's name in the cache.
        key: what tells its wheel from another one.
        name: the image's name.
        wheel_of: returns fenka's wheel.
    """

    def make(target: Path) -> None:
        made = release(target.parent)
        # Debian's packages are fetched once: a test must not depend on today's.
        builder = image.Builder(made, made.work, latest=False)
        names = {
            "org.opencontainers.image.ref.name": name.rpartition(":")[2],
            "io.containerd.image.name": name,
        }
        image.build_archive(builder, {platform.machine(): wheel_of(made)}, names, target)

    return archive(kind, hash_of(key, *RECIPE), make)


def fenka_image() -> Path:
    """Return the archive of fenka's image; build it, and the commands, if they are missing."""
    path = wheel()
    return _packed("fenka", wheel_folder().name, FENKA, lambda _: path)


def last_release_image() -> Path:
    """Return the archive of the last release's image; build it if it is missing. Raises LookupError.

    It has that release's wheel, and Debian and the dependencies of this one.
    """
    tree = last_release_tree()

    def wheel_of(made: Release) -> Path:
        built = tree / "dist"
        made.uv("build", "--quiet", "--wheel", "--out-dir", built, tree)
        (path,) = built.glob("*.whl")
        return path

    return _packed("last", tree.name, LAST_FENKA, wheel_of)


def release_image() -> Path:
    """Return the image of a release, for all processors; build it if it is missing."""

    def make(target: Path) -> None:
        with tempfile.TemporaryDirectory() as folder:
            made = Release(Path(folder), work=cache() / "release")
            wheels.build_wheels(made)
            builder = image.Builder(made, made.work, latest=False)
            packed = {processor: made.wheel(processor) for processor in made.processors}
            image.build_archive(builder, packed, {}, target)

    return archive("release", hash_of(wheel_folder().name, *RECIPE), make)
