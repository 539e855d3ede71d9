"""Debian packages: one for each processor, for all of Debian and Ubuntu from Python 3.11 on.

A package has a virtual environment in /usr/lib/fenka whose interpreter is the distribution's. A compiled
module has the name of its Python, so one folder of modules serves all of `PYTHONS`, as Debian's own does. All
Pythons have the libraries that the lock file has for the oldest one. Debian's tools are not needed, and two
builds have the same bytes.
"""

import configparser
import gzip
import hashlib
import io
import lzma
import re
import shutil
import tarfile
import time
import zipfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

from packaging.requirements import Requirement

from deploy.release.pages import build_pages
from deploy.release.recipe import PROCESSORS, ROOT, Release, ReleaseError

PYTHONS: Final = ("3.11", "3.12", "3.13", "3.14")
"""Debian 12, Ubuntu 24.04, Debian 13, Ubuntu 26.04."""

SOURCES: Final = ROOT / "deploy" / "debian"
HOME: Final = "usr/lib/fenka"
MODULES: Final = f"{HOME}/site-packages"

SCRIPTS: Final = ("postinst", "prerm", "postrm")
CONFIGURATION: Final = ("etc/fenka/daemon.toml",)

FILES: Final = {
    "daemon.toml": "etc/fenka/daemon.toml",
    "fenka.service": "usr/lib/systemd/system/fenka.service",
    "apparmor": "usr/share/fenka/apparmor",
    "lintian-overrides": "usr/share/lintian/overrides/fenka",
    "copyright": "usr/share/doc/fenka/copyright",
}

_REVISION = 1

_DROPPED = re.compile(
    r"^(bin/|\.lock$)|/tests/|/f2py/|/_\w+_tests\.|\.(pyi|pxd|pyx|pxi|h|hh|c|a)$"
    r"|\.dist-info/(RECORD|INSTALLER|REQUESTED)$"
)
"""Parts of libraries that no program of fenka reads."""

_MAY_DIFFER = re.compile(r"(\.dist-info/(WHEEL|uv_cache\.json)|^numpy/__config__\.py)$")
"""Files that describe the build of a library, and differ between the wheels of several Pythons."""

_CONTROL = """\
Package: fenka
Version: {version}
Architecture: {architecture}
Maintainer: fenka maintainers <maintainers@fenka.io>
Installed-Size: {kib}
Depends: python3 (>= {oldest}~), python3 (<< {beyond}~), libc6 (>= 2.28), libgcc-s1, libstdc++6, \
init-system-helpers (>= 1.54~)
Recommends: systemd
Section: admin
Priority: optional
Homepage: https://fenka.io
Description: GPU sharing for people who have fewer GPUs than programs
 fenka gives each program a slice of a GPU's memory and time, and queues the
 programs for which no slice is free. Programs see a GPU of their slice's size.
 .
 A service leases the GPUs of this machine to all of its users. The same
 commands submit programs to a Kubernetes cluster.
"""


def build_debs(release: Release) -> list[Path]:
    """Build a package for each processor. Raises ReleaseError."""
    return [
        build_deb(release, release.wheel(processor), processor) for processor in release.processors
    ]


def build_deb(
    release: Release, wheel: Path, processor: str, version: str = "", preset: int = 6
) -> Path:
    """Build the package with a wheel.

    Args:
        release: Where everything is.
        wheel: The wheel for the processor.
        processor: Its name in Linux.
        version: Instead of the release's version and the revision 1.
        preset: How well xz compresses, from 0.

    Raises:
        ReleaseError: The wheels of two Pythons contradict each other, or a program failed.
    """
    version = version or f"{debian_version(release.version)}-{_REVISION}"
    root = release.work / "deb" / processor / "root"
    shutil.rmtree(root, ignore_errors=True)
    modules = root / MODULES
    modules.parent.mkdir(parents=True)
    shutil.copytree(_libraries(release, processor), modules)
    _install_wheel(wheel, modules)
    _make_environment(root)
    _make_commands(root, wheel)
    _install_files(release, root, version)
    control = _control(root, version, PROCESSORS[processor])
    package = release.into / f"fenka_{version}_{PROCESSORS[processor]}.deb"
    package.write_bytes(
        _ar(
            {
                "debian-binary": b"2.0\n",
                "control.tar.xz": _tar(_members(control), release.epoch),
                "data.tar.xz": _tar(_members(root), release.epoch, preset),
            },
            release.epoch,
        )
    )
    return package


def debian_version(version: str) -> str:
    """Return a version of Python's as Debian orders it: a pre-release comes before its release."""
    return re.sub(r"\.?(a|b|rc|dev)(\d+)", r"~\1\2", version)


# --- content --------------------------------------------------------------------------------------


def _libraries(release: Release, processor: str) -> Path:
    """Return a folder with the libraries of all Pythons, which earlier runs may have made."""
    requirements = "".join(_requirements(release))
    sources = "\n".join((requirements, *PYTHONS, _DROPPED.pattern)).encode()
    work = release.work / "deb" / processor / "libraries" / hashlib.sha256(sources).hexdigest()[:12]
    if (work / "complete").exists():
        return work / "complete"
    for earlier in work.parent.glob("*"):
        shutil.rmtree(earlier)
    merged = work / "merged"
    merged.mkdir(parents=True)
    listed = work / "requirements.txt"
    listed.write_text(requirements)
    for python in PYTHONS:
        folder = work / python
        release.uv(
            *("pip", "install", "--quiet", "--no-deps", "--require-hashes"),
            *("--only-binary", ":all:", "--python-version", python),
            *("--python-platform", f"{processor}-manylinux_2_28", "--target", folder),
            *("--link-mode", "copy", "--requirement", listed),
        )
        _merge(folder, merged)
        shutil.rmtree(folder)
    return merged.rename(work / "complete")


def _requirements(release: Release) -> Iterator[str]:
    """Yield the locked requirements of the oldest Python, with their hashes and without conditions."""
    exported = release.uv(
        *("export", "--quiet", "--project", ROOT, "--frozen", "--no-default-groups"),
        *("--no-emit-project", "--no-header", "--no-annotate"),
    ).decode()
    environment = {
        "python_version": PYTHONS[0],
        "python_full_version": f"{PYTHONS[0]}.0",
        "sys_platform": "linux",
        "platform_system": "Linux",
        "implementation_name": "cpython",
        "platform_python_implementation": "CPython",
    }
    for entry in exported.replace("\\\n", " ").splitlines():
        requirement, *hashes = entry.split(" --hash=")
        parsed = Requirement(requirement.strip())
        if parsed.marker is None or parsed.marker.evaluate(environment):
            words = [f"{parsed.name}{parsed.specifier}", *(f"--hash={code}" for code in hashes)]
            yield " ".join(word.strip() for word in words) + "\n"


def _merge(folder: Path, modules: Path) -> None:
    """Move what wheels of one Python have installed to that of the others."""
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        name = str(path.relative_to(folder))
        if _DROPPED.search(name):
            continue
        target = modules / name
        if not target.exists():
            target.parent.mkdir(parents=True, exist_ok=True)
            path.rename(target)
        elif target.read_bytes() != path.read_bytes() and not _MAY_DIFFER.search(name):
            raise ReleaseError(
                f"{name} is not the same in the wheels of Python {folder.name} and of an older one, so one "
                "package cannot have both: let `_MAY_DIFFER` in deploy/release/deb.py name it if any will do"
            )


def _install_wheel(wheel: Path, modules: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        for entry in archive.infolist():
            if entry.is_dir() or entry.filename.endswith(("/RECORD", "/WHEEL")):
                continue
            target = modules / entry.filename
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(archive.read(entry))
            if entry.external_attr >> 16 & 0o111 and ".so" not in target.suffixes:
                target.chmod(0o755)


def _make_environment(root: Path) -> None:
    """Make a virtual environment that every Python finds its modules in."""
    home = root / HOME
    (home / "bin").mkdir()
    (home / "bin" / "python3").symlink_to("/usr/bin/python3")
    (home / "pyvenv.cfg").write_text("home = /usr/bin\ninclude-system-site-packages = false\n")
    for python in PYTHONS:
        (home / "lib" / f"python{python}").mkdir(parents=True)
        (home / "lib" / f"python{python}" / "site-packages").symlink_to("../../site-packages")


def _make_commands(root: Path, wheel: Path) -> None:
    """Make the wheel's commands. A user's PYTHONPATH is for the user's own programs."""
    name = "-".join(wheel.name.split("-")[:2])
    parser = configparser.ConfigParser()
    parser.read_string((root / MODULES / f"{name}.dist-info" / "entry_points.txt").read_text())
    (root / "usr" / "bin").mkdir()
    for command, entry in parser["console_scripts"].items():
        module, function = entry.split(":")
        script = root / "usr" / "bin" / command
        script.write_text(
            f"#!/{HOME}/bin/python3 -I\nimport sys\n\nfrom {module} import {function}\n\n"
            f"sys.exit({function}())\n"
        )
        script.chmod(0o755)


def _install_files(release: Release, root: Path, version: str) -> None:
    for name, path in FILES.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(SOURCES / name, root / path)
    date = time.strftime("%a, %d %b %Y %H:%M:%S +0000", time.gmtime(release.epoch))
    entry = (
        f"fenka ({version}) stable; urgency=medium\n\n  * Release {release.version}: see changelog.gz.\n\n"
        f" -- fenka maintainers <maintainers@fenka.io>  {date}\n"
    )
    documents = root / "usr" / "share" / "doc" / "fenka"
    shutil.copyfile(ROOT / "CHANGELOG.md", documents / "changelog")
    (documents / "changelog.Debian").write_text(entry)
    if not release.share.exists():
        build_pages(release)
    shutil.copytree(release.share, root / "usr" / "share", dirs_exist_ok=True)
    pages = [path for path in (root / "usr/share/man").rglob("*") if path.is_file()]
    for text in (documents / "changelog", documents / "changelog.Debian", *pages):
        packed = gzip.compress(text.read_bytes(), mtime=release.epoch)
        text.with_name(f"{text.name}.gz").write_bytes(packed)
        text.unlink()


def _control(root: Path, version: str, architecture: str) -> Path:
    """Make the folder of the package's description, and return it."""
    control = root.parent / "control"
    shutil.rmtree(control, ignore_errors=True)
    control.mkdir()
    files = sorted(path for path in root.rglob("*") if path.is_file() and not path.is_symlink())
    minor = int(PYTHONS[-1].removeprefix("3."))
    (control / "control").write_text(
        _CONTROL.format(
            version=version,
            architecture=architecture,
            kib=sum(-(-path.stat().st_size // 1024) for path in files),
            oldest=PYTHONS[0],
            beyond=f"3.{minor + 1}",
        )
    )
    (control / "md5sums").write_text(
        "".join(
            f"{hashlib.md5(path.read_bytes()).hexdigest()}  {path.relative_to(root)}\n"
            for path in files
            if str(path.relative_to(root)) not in CONFIGURATION
        )
    )
    (control / "conffiles").write_text("".join(f"/{path}\n" for path in CONFIGURATION))
    shutil.copyfile(SOURCES / "triggers", control / "triggers")
    for name in SCRIPTS:
        shutil.copyfile(SOURCES / name, control / name)
        (control / name).chmod(0o755)
    return control


# --- archives -------------------------------------------------------------------------------------


def _members(folder: Path) -> Iterator[tuple[str, Path]]:
    """Yield all files and folders below a folder, parents first."""
    for path in sorted(folder.rglob("*")):
        yield f"./{path.relative_to(folder)}", path


def _tar(members: Iterable[tuple[str, Path]], epoch: int, preset: int = 6) -> bytes:
    """Return an archive of root's files that depends on names and contents only."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w", format=tarfile.GNU_FORMAT) as archive:
        for name, path in (("./", SOURCES), *members):
            entry = archive.gettarinfo(path, name)
            entry.uid = entry.gid = 0
            entry.uname = entry.gname = "root"
            entry.mtime = epoch
            is_library = ".so" in path.suffixes
            is_program = entry.mode & 0o100 and not is_library
            entry.mode = 0o755 if entry.isdir() or is_program else 0o644
            if entry.issym():
                entry.mode = 0o777
            if entry.islnk():  # Two names of one file in uv's cache.
                entry.type, entry.linkname = tarfile.REGTYPE, ""
                entry.size = path.stat().st_size
            with path.open("rb") if entry.isreg() else io.BytesIO() as content:
                archive.addfile(entry, content if entry.isreg() else None)
    return lzma.compress(packed.getvalue(), preset=preset)


def _ar(members: dict[str, bytes], epoch: int) -> bytes:
    """Return an archive of the kind that Debian packages are."""
    parts = [b"!<arch>\n"]
    for name, content in members.items():
        parts.append(
            f"{name:<16}{epoch:<12}{0:<6}{0:<6}{'100644':<8}{len(content):<10}`\n".encode()
        )
        parts.append(content + b"\n" * (len(content) % 2))
    return b"".join(parts)
