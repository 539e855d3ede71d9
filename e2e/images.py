"""Build the images of the cluster's pods without a registry or a daemon.

``python -m e2e.images`` builds the missing ones. Each image is an archive in the cache, keyed by the hash of
its sources. After a change of fenka's source only the wheel and one layer are built again.
"""

import hashlib
import io
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from e2e.configuration import PAUSE
from e2e.machine import HANGS_AFTER_S, ClusterError, missing_programs, tail
from e2e.programs import COMPLETE, cache, directories, exclusive_lock
from e2e.supervisor import REPOSITORY

BUSYBOX = "localhost/busybox:e2e"
WORKLOAD = "localhost/fenka-workload:e2e"
FENKA = "localhost/fenka:e2e"
BASE = "localhost/fenka-base"

HERE = Path(__file__).parent / "containers"
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
# Arguments: the folder of programs, the folder to unpack into, the archives.
UNPACK = """
PATH=$1:$PATH store=$2 run=$(mktemp -d); shift 2
mount -t tmpfs run "$run"
cat > "$run/config.toml" <<END
version = 3
root = "$store"
state = "$run/state"
disabled_plugins = ["io.containerd.grpc.v1.cri", "io.containerd.nri.v1.nri"]
[grpc]
address = "$run/socket"
END
containerd --config "$run/config.toml" > "$run/log" 2>&1 & daemon=$!
ctr() { command ctr --address "$run/socket" -n k8s.io "$@"; }
tries=0
until ctr version > /dev/null 2>&1; do
  tries=$((tries + 1)); [ $tries -lt 100 ] || { cat "$run/log" >&2; kill $daemon; exit 1; }
  sleep 0.1
done
for archive; do ctr images import "$archive" > /dev/null || { kill $daemon; exit 1; }; done
kill $daemon
wait $daemon || true
umount -l "$run"; rmdir "$run"
"""
CA_CERTIFICATES = Path("etc/ssl/certs/ca-certificates.crt")


def all_images() -> list[Path]:
    """Return the archives of all images; build the missing ones first."""
    missing = missing_programs("buildah", "debootstrap", "busybox", "gcc")
    if missing:
        raise ClusterError(f"the images need programs that are not installed: {', '.join(missing)}")
    with exclusive_lock(cache() / "images.lock"):
        return [pause(), busybox(), workload(), fenka()]


def image_store() -> Path:
    """Return containerd's folder with all images unpacked, so that a node need not import them."""
    archives = all_images()
    programs = directories()[0]
    version = programs.parent.name
    store = cache() / f"store-{hash_of(version, *(each.name for each in archives))}"
    with exclusive_lock(cache() / "images.lock"):
        if (store / COMPLETE).exists():
            os.utime(store)
            return store
        began = time.monotonic()
        shutil.rmtree(store, ignore_errors=True)
        # The latest store already has most of the images.
        earlier = sorted(cache().glob("store-*"), key=lambda path: path.stat().st_mtime)
        unpacked: list[str] = []
        if earlier and (earlier[-1] / COMPLETE).exists():
            made_by, *names = (earlier[-1] / COMPLETE).read_text().split()
            if made_by == version:
                copy_store(earlier[-1], store)
                (store / COMPLETE).unlink()
                unpacked = names
        store.mkdir(parents=True, exist_ok=True)
        missing = [each for each in archives if each.name not in unpacked]
        # A separate mount namespace: containerd mounts what it unpacks.
        alone = ["unshare", "--mount", "sh", "-euc", UNPACK, "sh", str(programs), str(store)]
        run_checked([*alone, *map(str, missing)], timeout=300)
        (store / COMPLETE).write_text("\n".join([version, *(each.name for each in archives)]))
        for old in earlier[:-2]:
            shutil.rmtree(old)
    print(f"unpacked {len(missing)} images in {time.monotonic() - began:.1f} s", flush=True)
    return store


def copy_store(store: Path, target: Path) -> None:
    """Copy the store for a node: hard-link all files but databases, which containerd changes in place."""
    target.mkdir(parents=True, exist_ok=True)
    if store.stat().st_dev != target.stat().st_dev:
        run_checked(["cp", "-a", f"{store}/.", str(target)])
        return
    run_checked(["cp", "-al", f"{store}/.", str(target)])
    for database in target.rglob("*.db"):
        if database.parent.name.startswith("io.containerd."):
            copy = database.with_suffix(".copy")
            shutil.copy(database, copy)
            copy.replace(database)


def archive(name: str, key: str, make: Callable[[Path], None]) -> Path:
    """Return the archive of an image in the cache; `make` writes it to a path if it is missing."""
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
    remove_old_archives(folder, name)
    print(f"made {cached.name} in {time.monotonic() - began:.1f} s", flush=True)
    return cached


def remove_old_archives(folder: Path, name: str, keep: int = 6) -> None:
    """Remove the oldest archives: each change of the source adds one of 150 MB."""
    made = sorted(folder.glob(f"{name}-*.tar"), key=lambda path: path.stat().st_mtime)
    for old in made[:-keep]:
        old.unlink()


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


# Two images of a few files, written without a build tool.


def pause() -> Path:
    """Return the image of the sandbox container, which holds a pod's namespaces."""
    source = HERE / "pause.c"

    def make(target: Path) -> None:
        with tempfile.TemporaryDirectory() as folder:
            program = Path(folder, "pause")
            run_checked(["gcc", "-Os", "-static", "-s", "-o", str(program), str(source)])
            config = {"Entrypoint": ["/pause"]}
            target.write_bytes(image_of(PAUSE, config, {"pause": program.read_bytes()}, ()))

    return archive("pause", hash_of(source), make)


def busybox() -> Path:
    """Return the image with a shell and small tools."""
    program = Path(shutil.which("busybox") or "/bin/busybox")

    def make(target: Path) -> None:
        names = run_checked([str(program), "--list"]).split()
        config = {"Cmd": ["sh"], "Env": ["PATH=/bin"]}
        files = {"bin/busybox": program.read_bytes()}
        target.write_bytes(image_of(BUSYBOX, config, files, names))

    return archive("busybox", hash_of(program), make)


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


# Two images from Dockerfiles, based on a Debian built here.


def workload() -> Path:
    """Return the image with Python and bindings to CUDA and NVML, at the locked versions."""
    dockerfile = HERE / "workload.Dockerfile"
    locked = [REPOSITORY / "pyproject.toml", REPOSITORY / "uv.lock"]

    def make(target: Path) -> None:
        build_image(WORKLOAD, dockerfile, locked, target)

    return archive("workload", hash_of(base_key(), dockerfile, *locked), make)


def fenka() -> Path:
    """Return fenka's image, built from the Dockerfile that users build."""
    dockerfile = REPOSITORY / "deploy" / "Dockerfile"
    locked = [REPOSITORY / "pyproject.toml", REPOSITORY / "uv.lock"]
    run_checked(["make", "--no-print-directory", "-C", str(REPOSITORY / "native")], timeout=600)
    sources = sorted(
        path
        for path in (REPOSITORY / "src").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    )
    names = "\n".join(str(path.relative_to(REPOSITORY)) for path in sources)
    hatch = REPOSITORY / "hatch_build.py"

    def make(target: Path) -> None:
        with tempfile.TemporaryDirectory() as folder:
            wheel = build_wheel(Path(folder))
            build_image(FENKA, dockerfile, [*locked, wheel], target)

    return archive("fenka", hash_of(base_key(), names, dockerfile, hatch, *locked, *sources), make)


def build_wheel(folder: Path) -> Path:
    """Build fenka's wheel in dist/ below a folder, and return its path."""
    tools = REPOSITORY / ".tools" / "bin" / "uv"
    uv = str(tools) if tools.exists() else "uv"
    dist = folder / "dist"
    run_checked(
        [uv, "build", "--quiet", "--wheel", "--out-dir", str(dist), str(REPOSITORY)], timeout=300
    )
    return next(dist.glob("*.whl"))


def build_image(name: str, dockerfile: Path, files: list[Path], target: Path) -> None:
    """Build a Dockerfile in a context that holds only these files."""
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
            str(context),
        )
        buildah("push", "--quiet", name, f"docker-archive:{target}:{name}")


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


def main() -> int:
    """Build the missing images and print all."""
    try:
        image_store()
        for path in all_images():
            print(f"{path.stat().st_size / 1e6:6.1f} MB  {path}")
    except ClusterError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
