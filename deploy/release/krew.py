"""Plugins of kubectl for krew: an archive a platform, and the manifests of `fenka` and `inspect-gpushare`.

An archive has fenka and the locked versions of its dependencies for each Python from 3.11 on. So nothing is
fetched when the plugin runs; only Python itself comes from the user's computer.
"""

import hashlib
import shutil
from pathlib import Path
from typing import Any, Final

import yaml

from deploy.release.archive import files_below, write_archive
from deploy.release.manifest import sha256
from deploy.release.recipe import PROCESSORS, Release

PYTHONS: Final = ("3.11", "3.12", "3.13", "3.14")
PLATFORMS: Final = {
    ("linux", "x86_64"): "x86_64-manylinux_2_28",
    ("linux", "aarch64"): "aarch64-manylinux_2_28",
    ("darwin", "x86_64"): "x86_64-apple-darwin",
    ("darwin", "aarch64"): "aarch64-apple-darwin",
}
"""uv's names of the platforms, by krew's name of the system and the processor."""

_UNUSED = ("bin", "share", "**/tests", "**/*.pyi", "numpy/_core/include", "numpy/f2py")

_LAUNCHER = """\
#!/bin/sh
# Runs fenka with the first Python on PATH for which this plugin has modules.
file=$0
while [ -L "$file" ]; do
  to=$(readlink "$file")
  case $to in /*) file=$to ;; *) file=$(dirname "$file")/$to ;; esac
done
here=$(cd "$(dirname "$file")" && pwd)
for python in python3 python3.14 python3.13 python3.12 python3.11; do
  version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null) || continue
  [ ! -d "$here/$version" ] || exec "$python" -P "$here/plugin.py" @COMMAND@ "$version" "$@"
done
echo "kubectl @PLUGIN@ needs Python @PYTHONS@ as python3, and found none: install one" >&2
exit 1
"""

_PLUGIN = '''\
"""Runs a command of fenka with the modules beside this file."""

import os
import sys

here = os.path.dirname(os.path.abspath(__file__))
command, version = sys.argv[1:3]
sys.argv[1:] = sys.argv[3:]
sys.path[:0] = [os.path.join(here, "modules"), os.path.join(here, version)]
if command == "fenka":
    from fenka.__main__ import main
else:
    from fenka.cli.compat.inspect_gpushare import main
main()
'''

_DESCRIPTIONS = {
    "fenka": (
        "Share GPUs: slices of cards for pods",
        "Shows the cards of a cluster and which pods have slices of them, explains why a pod\n"
        "waits, resizes running pods, and submits trainings, notebooks and services.\n",
    ),
    "inspect-gpushare": (
        "Show how GPU memory is shared",
        "Shows each node's GPU memory and the pods that share it, as gpushare's plugin does,\n"
        "for clusters with fenka or with gpushare.\n",
    ),
}
_CAVEATS = f"Needs Python {', '.join(PYTHONS)} as python3.\n"


def build_plugins(release: Release) -> list[Path]:
    """Write the archives and the manifests. Needs the wheel `any`. Raises ReleaseError."""
    locked = release.work / "requirements.txt"
    locked.write_bytes(
        release.uv(
            *("export", "--frozen", "--quiet", "--no-default-groups", "--no-emit-project"),
            *("--no-annotate", "--no-header"),
        )
    )
    platforms, archives = [], []
    for (system, processor), platform in PLATFORMS.items():
        if processor not in release.processors:
            continue
        folder = plugin_folder(release, system, processor)
        fill_plugin(release, folder, platform, PYTHONS)
        name = f"kubectl-fenka-{release.version}-{system}-{PROCESSORS[processor]}.tar.gz"
        archive = release.into / name
        write_archive(archive, files_below(folder), release.epoch)
        shutil.rmtree(folder)
        archives.append(archive)
        platforms.append(_platform(release, system, processor, archive))
    manifests = []
    for name in _DESCRIPTIONS:
        manifest = release.into / f"{name}.yaml"
        manifest.write_text(yaml.safe_dump(_manifest(release, name, platforms), sort_keys=False))
        manifests.append(manifest)
    return [*archives, *manifests]


def plugin_folder(release: Release, system: str, processor: str) -> Path:
    """Return an empty folder for the files of a plugin."""
    folder = release.work / "krew" / f"{system}-{processor}"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return folder


def fill_plugin(release: Release, folder: Path, platform: str, pythons: tuple[str, ...]) -> None:
    """Write all that an archive holds, for these versions of Python. Raises ReleaseError."""
    for python in pythons:
        where = ("--target", folder / python, "--python-platform", platform)
        release.uv(
            *("pip", "install", "--quiet", "--no-deps", "--only-binary", ":all:", *where),
            *(
                "--python-version",
                python,
                "--require-hashes",
                "-r",
                release.work / "requirements.txt",
            ),
        )
        for pattern in _UNUSED:
            for unused in [*(folder / python).glob(pattern)]:
                shutil.rmtree(unused) if unused.is_dir() else unused.unlink()
    _share_modules(folder, pythons)
    release.uv(
        *("pip", "install", "--quiet", "--no-deps", "--target", folder / "modules"),
        *("--python-version", pythons[0], release.wheel("any")),
    )
    for name in ("bin", "share"):
        shutil.rmtree(folder / "modules" / name, ignore_errors=True)
    for record in folder.rglob("*.dist-info"):
        # They name folders and times of the build.
        for name in ("RECORD", "direct_url.json", "uv_cache.json", "INSTALLER", "REQUESTED"):
            (record / name).unlink(missing_ok=True)
    (folder / "plugin.py").write_text(_PLUGIN)
    write_launchers(folder, pythons)
    (folder / "LICENSE").write_bytes(
        next((folder / "modules").rglob("licenses/LICENSE")).read_bytes()
    )


def write_launchers(folder: Path, pythons: tuple[str, ...]) -> None:
    """Write the programs that kubectl calls."""
    for plugin, command in (("fenka", "fenka"), ("inspect-gpushare", "inspect")):
        launcher = folder / f"kubectl-{plugin}"
        text = _LAUNCHER.replace("@COMMAND@", command).replace("@PLUGIN@", plugin)
        launcher.write_text(text.replace("@PYTHONS@", " or ".join(pythons)))
        launcher.chmod(0o755)


def _share_modules(folder: Path, pythons: tuple[str, ...]) -> None:
    """Move packages that are the same for all versions of Python to the folder `modules`."""
    (folder / "modules").mkdir()
    first, *others = (folder / python for python in pythons)
    for path in sorted(first.iterdir()):
        if path.name == "numpy.libs":
            # numpy finds its libraries beside itself.
            continue
        digest = _digest(path)
        if all(_digest(other / path.name) == digest for other in others):
            shutil.move(path, folder / "modules" / path.name)
            for other in others:
                copy = other / path.name
                shutil.rmtree(copy) if copy.is_dir() else copy.unlink()


def _digest(path: Path) -> str:
    """Return a digest of a file, or of all names and files in a folder. Nothing has another one."""
    files = [path] if path.is_file() else sorted(file for file in path.rglob("*") if file.is_file())
    digest = hashlib.sha256(str(path.exists()).encode())
    for file in files:
        digest.update(bytes(file.relative_to(path.parent)) + b"\0" + file.read_bytes())
    return digest.hexdigest()


def _platform(release: Release, system: str, processor: str, archive: Path) -> dict[str, Any]:
    return {
        "selector": {"matchLabels": {"os": system, "arch": PROCESSORS[processor]}},
        "uri": f"{release.download_url}/{archive.name}",
        "sha256": sha256(archive),
    }


def _manifest(release: Release, name: str, platforms: list[dict[str, Any]]) -> dict[str, Any]:
    short, long = _DESCRIPTIONS[name]
    return {
        "apiVersion": "krew.googlecontainertools.github.com/v1alpha2",
        "kind": "Plugin",
        "metadata": {"name": name},
        "spec": {
            "version": f"v{release.version}",
            "homepage": release.download_url.rpartition("/")[0],
            "shortDescription": short,
            "description": long,
            "caveats": _CAVEATS,
            "platforms": [{**platform, "bin": f"kubectl-{name}"} for platform in platforms],
        },
    }
