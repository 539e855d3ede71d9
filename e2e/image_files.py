"""Make images without a registry or a daemon: from files, or from a Dockerfile based on a Debian built here.

Each image is an archive in the cache, keyed by the hash of its sources.
"""

import hashlib
import io
import json
import os
import shutil
import subprocess
import tarfile
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from e2e.machine import HANGS_AFTER_S, ClusterError, tail
from e2e.programs import cache, keep_latest

BASE = "localhost/fenka-base"
SUITE = "bookworm"
PACKAGES = "ca-certificates,python3,python3-venv"
# Files that no container needs: a third of the base image.
UNNEEDED_PATHS = (
    "usr/share/doc",
    "usr/share/info",
    "usr/share/locale",
    "usr/share/man",
    "var/cache/apt",
    "var/cache/debconf",
    "var/lib/apt/lists",
    "var/log/apt",
)
CA_CERTIFICATES = Path("etc/ssl/certs/ca-certificates.crt")


def archive(name: str, key: str, make: Callable[[Path], None], keep: int = 2) -> Path:
    """Return the archive of an image in the cache; `make` writes it to a path if it is missing.

    Only the latest `keep` archives of this name are kept.
    """
    folder = cache() / "images"
    cached = folder / f"{name}-{key}.tar"
    if cached.exists():
        os.utime(cached)
        return cached
    began = time.monotonic()
    folder.mkdir(parents=True, exist_ok=True)
    partial = cached.with_suffix(".partial")
    partial.unlink(missing_ok=True)
    make(partial)
    partial.rename(cached)
    keep_latest(folder.glob(f"{name}-*.tar"), keep)
    print(f"made {cached.name} in {time.monotonic() - began:.1f} s", flush=True)
    return cached


def hash_of(*parts: bytes | str | Path) -> str:
    """Return a short hash of texts and of files with their base names."""
    digest = hashlib.sha256()
    for part in parts:
        if isinstance(part, Path):
            digest.update(part.name.encode() + b"\0" + part.read_bytes())
        else:
            digest.update(part if isinstance(part, bytes) else part.encode())
        digest.update(b"\0")
    return digest.hexdigest()[:16]


def image_of(
    name: str,
    config: Mapping[str, object],
    files: Mapping[str, bytes],
    links: tuple[str, ...] | list[str],
) -> bytes:
    """Return a Docker archive with one layer of files, and links in bin/ to bin/busybox."""
    layer = io.BytesIO()
    with tarfile.open(fileobj=layer, mode="w") as tar:
        for folder in ("bin", "tmp", "etc"):
            entry = tarfile.TarInfo(folder)
            entry.type, entry.mode = tarfile.DIRTYPE, 0o1777 if folder == "tmp" else 0o755
            tar.addfile(entry)
        for path, content in files.items():
            entry = tarfile.TarInfo(path)
            entry.size, entry.mode = len(content), 0o755
            tar.addfile(entry, io.BytesIO(content))
        for link in links:
            entry = tarfile.TarInfo(f"bin/{link}")
            entry.type, entry.linkname = tarfile.SYMTYPE, "busybox"
            if link != "busybox":
                tar.addfile(entry)
    blob = layer.getvalue()
    document = {
        "architecture": "amd64",
        "os": "linux",
        "config": config,
        "rootfs": {"type": "layers", "diff_ids": [f"sha256:{hashlib.sha256(blob).hexdigest()}"]},
    }
    parts = {
        "config.json": json.dumps(document).encode(),
        "layer.tar": blob,
        "manifest.json": json.dumps(
            [{"Config": "config.json", "RepoTags": [name], "Layers": ["layer.tar"]}]
        ).encode(),
    }
    whole = io.BytesIO()
    with tarfile.open(fileobj=whole, mode="w") as tar:
        for path, content in parts.items():
            entry = tarfile.TarInfo(path)
            entry.size = len(content)
            tar.addfile(entry, io.BytesIO(content))
    return whole.getvalue()


def build_image(
    name: str, dockerfile: Path, files: list[Path], target: Path, volume: str = ""
) -> None:
    """Build a Dockerfile in a context that holds only these files.

    Args:
        name: the image's.
        dockerfile: its path.
        files: copied into the context, wheels into dist/ there.
        target: the archive to write.
        volume: PATH:PATH, a folder of this machine and where commands of the Dockerfile see it.
    """
    base = base_image()
    with tempfile.TemporaryDirectory() as folder:
        context = Path(folder)
        (context / "dist").mkdir()
        for path in files:
            # With a fixed time buildah reuses the layer: its cache key includes content and time.
            copy = context / ("dist" if path.suffix == ".whl" else "") / path.name
            shutil.copy(path, copy)
            os.utime(copy, (0, 0))
        buildah(
            "bud",
            "--quiet",
            "--layers",
            "--isolation=chroot",
            "--network=host",
            "--pull=never",
            f"--build-arg=BASE={base}",
            f"--file={dockerfile}",
            f"--tag={name}",
            *([f"--volume={volume}"] if volume else []),
            str(context),
        )
        buildah("push", "--quiet", name, f"docker-archive:{target}:{name}")
        # The layers of earlier builds, which no image has any more: a gigabyte for each change.
        buildah("rmi", "--prune")


def base_key() -> str:
    """Return a hash of everything that the base image is built from."""
    host = Path("/") / CA_CERTIFICATES
    return hash_of(SUITE, PACKAGES, repr(UNNEEDED_PATHS), host if host.exists() else "")


def base_image() -> str:
    """Build a minimal Debian with Python in buildah's storage if it is missing, and return its name."""
    name = f"{BASE}:{base_key()}"
    if base_key() in buildah("images", "--format", "{{.Tag}}"):
        return name
    began = time.monotonic()
    with tempfile.TemporaryDirectory(dir=cache()) as folder:
        root, packed = Path(folder, "root"), Path(folder, "root.tar")
        include = f"--include={PACKAGES}"
        log = cache() / "debootstrap.log"
        run_checked(
            ["debootstrap", "--variant=minbase", include, SUITE, str(root)], log, timeout=900
        )
        for unneeded in UNNEEDED_PATHS:
            shutil.rmtree(root / unneeded, ignore_errors=True)
            (root / unneeded).mkdir(parents=True)
        # Trust this machine's certificate authorities: a proxy may intercept the build's TLS.
        if (Path("/") / CA_CERTIFICATES).exists():
            shutil.copy(Path("/") / CA_CERTIFICATES, root / CA_CERTIFICATES)
        without = [f"--exclude=./{each}/*" for each in ("dev", "proc", "sys")]
        run_checked(["tar", "--numeric-owner", *without, "-C", str(root), "-cf", str(packed), "."])
        container = buildah("from", "scratch").strip()
        buildah("add", "--quiet", container, str(packed), "/")
        buildah("commit", "--quiet", "--rm", container, name)
    print(f"made the base image in {time.monotonic() - began:.0f} s", flush=True)
    return name


def buildah(command: str, *arguments: str) -> str:
    """Run buildah with its own storage, and return its output."""
    storage = cache() / "buildah"
    # Locks must not survive a reboot, so they are not in the cache.
    run_root = Path("/run/fenka-e2e-buildah")
    where = [f"--root={storage}", f"--runroot={run_root}", "--storage-driver=overlay"]
    log = cache() / "buildah.log"
    return run_checked(["buildah", *where, command, *arguments], log, timeout=1200)


def run_checked(command: list[str], log: Path | None = None, timeout: float = HANGS_AFTER_S) -> str:
    """Run a program and return its output. Its error output goes to the log or into ClusterError."""
    done = subprocess.run(
        ["nice", *command],
        capture_output=True,
        text=True,
        errors="replace",
        timeout=timeout,
        check=False,
        stdin=subprocess.DEVNULL,
    )
    if log:
        log.parent.mkdir(parents=True, exist_ok=True)
        log.write_text(f"{' '.join(command)}\n{done.stdout}{done.stderr}")
    if done.returncode:
        output = tail(log) or f": {done.stderr.strip() or done.stdout.strip()}"
        raise ClusterError(f"{command[0]} failed ({done.returncode}){output}")
    return done.stdout
