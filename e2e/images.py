"""Build the images of the cluster's pods without a registry or a daemon.

``python -m e2e.images`` builds the missing ones. Each image is an archive in the cache, keyed by the hash of
its sources. fenka's own is that of a release (artifacts.py).
"""

import os
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from e2e.artifacts import chart, fenka_image
from e2e.configuration import PAUSE
from e2e.image_files import archive, base_key, build_image, hash_of, image_of, run_checked
from e2e.machine import ClusterError, require_programs
from e2e.programs import (
    COMPLETE,
    OWN,
    BuildError,
    build,
    cache,
    chosen_containerd,
    directories,
    exclusive_lock,
    keep_latest,
)
from e2e.programs import CONTOUR as CONTOUR_MODULE
from e2e.programs import KEDA as KEDA_MODULE
from e2e.programs import KUEUE as KUEUE_MODULE
from e2e.supervisor import REPOSITORY

BUSYBOX = "localhost/busybox:e2e"
WORKLOAD = "localhost/fenka-workload:e2e"
JOBSET = "localhost/jobset:e2e"
GIT = "localhost/fenka-git:e2e"
TRAINING = "localhost/fenka-training:e2e"
MPI_SSH = "localhost/fenka-mpi-ssh:e2e"
NOTEBOOK = "localhost/fenka-notebook:e2e"
FRAMEWORKS = "localhost/fenka-frameworks:e2e"
KEDA = "localhost/keda:e2e"
CONTOUR = "localhost/contour:e2e"
KUEUE = "localhost/kueue:e2e"
FULL = os.environ.get("FENKA_E2E_TIER") == "full"
"""Whether the scenarios run that take minutes each, and the images that only they need are built."""

HERE = Path(__file__).parent / "containers"
MODEL_SERVER = REPOSITORY / "e2e" / "scenarios" / "serving" / "model_server.py"
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
# What earlier images of the same names left is collected when an image is removed, and only then.
any=$(ctr images ls -q | head -n 1)
ctr images tag "$any" localhost/collected:e2e > /dev/null
ctr images rm --sync localhost/collected:e2e > /dev/null
kill $daemon
wait $daemon || true
umount -l "$run"; rmdir "$run"
"""
CONFIGURATION_VERSIONS = ("version = 3", "version = 2")
"""The line of containerd 2's configuration, and the line of containerd 1.7's."""


def all_images() -> list[Path]:
    """Return the archives of all images; build the missing ones, and the chart and the wheel, first."""
    require_programs()
    with exclusive_lock(cache() / "images.lock"):
        chart()
        images = [pause, busybox, jobset, workload, git, mpi_ssh, training]
        large = [frameworks, notebook, keda, contour] if FULL else []
        return [make() for make in (*images, *large, fenka_image)]


def image_store() -> Path:
    """Return containerd's folder with all images unpacked, so that a node need not import them."""
    archives = all_images()
    module = chosen_containerd()
    version = module.directory().name
    store = cache() / f"store-{hash_of(version, *(each.name for each in archives))}"
    with exclusive_lock(cache() / "images.lock"):
        if (store / COMPLETE).exists():
            os.utime(store)
            return store
        began = time.monotonic()
        # It gets its name when it is complete: a copy that was interrupted looks like a whole one.
        partial = cache() / "partial-store"
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        # The latest store already has most of the images.
        earlier = sorted(cache().glob("store-*"), key=lambda path: path.stat().st_mtime)
        unpacked: list[str] = []
        if earlier and (earlier[-1] / COMPLETE).exists():
            made_by, *names = (earlier[-1] / COMPLETE).read_text().split()
            if made_by == version:
                copy_store(earlier[-1], partial)
                (partial / COMPLETE).unlink()
                unpacked = names
        missing = [each for each in archives if each.name not in unpacked]
        # A separate mount namespace: containerd mounts what it unpacks.
        script = UNPACK if module is OWN else UNPACK.replace(*CONFIGURATION_VERSIONS)
        programs = str(module.directory() / "bin")
        alone = ["unshare", "--mount", "sh", "-euc", script, "sh", programs, str(partial)]
        run_checked([*alone, *map(str, missing)], timeout=1800)
        (partial / COMPLETE).write_text("\n".join([version, *(each.name for each in archives)]))
        shutil.rmtree(store, ignore_errors=True)
        partial.rename(store)
        keep_latest(cache().glob("store-*"), keep=2)
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


# Images of a few files, written without a build tool.


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


def jobset() -> Path:
    """Return the image of JobSet's controller, with the path and the user that its chart expects."""
    programs = (folder / "jobset" for folder in directories())
    program = next(path for path in programs if path.exists())

    def make(target: Path) -> None:
        target.write_bytes(
            image_of(JOBSET, {"User": "65532:65532"}, {"manager": program.read_bytes()}, ())
        )

    return archive("jobset", hash_of(program), make)


def keda() -> Path:
    """Return the image of KEDA's two programs, with the paths and the user that its manifests expect."""

    def make(target: Path) -> None:
        build(KEDA_MODULE)
        programs = KEDA_MODULE.directory() / "bin"
        files = {"keda": "operator", "keda-adapter": "adapter"}
        content = {path: (programs / name).read_bytes() for path, name in files.items()}
        target.write_bytes(image_of(KEDA, {"User": "65532:65532"}, content, ()))

    return archive("keda", hash_of(KEDA_MODULE.key()), make, keep=1)


def kueue() -> Path:
    """Return the image of Kueue's controller. It is in no node's store: import it where it is to run."""

    def make(target: Path) -> None:
        build(KUEUE_MODULE)
        program = KUEUE_MODULE.directory() / "bin" / "kueue"
        files = {"manager": program.read_bytes()}
        target.write_bytes(image_of(KUEUE, {"User": "65532:65532"}, files, ()))

    return archive("kueue", hash_of(KUEUE_MODULE.key()), make, keep=1)


# Images from Dockerfiles, based on a Debian built here.


def workload() -> Path:
    """Return the image with Python and bindings to CUDA and NVML, at the locked versions."""
    dockerfile = HERE / "workload.Dockerfile"
    locked = [REPOSITORY / "pyproject.toml", REPOSITORY / "uv.lock"]

    def make(target: Path) -> None:
        build_image(WORKLOAD, dockerfile, locked, target)

    return archive("workload", hash_of(base_key(), dockerfile, *locked), make)


def git() -> Path:
    """Return the image with git, which clones a job's code, and serves repositories in the tests."""
    dockerfile = HERE / "git.Dockerfile"

    def make(target: Path) -> None:
        build_image(GIT, dockerfile, [], target)

    return archive("git", hash_of(base_key(), dockerfile), make)


def mpi_ssh() -> Path:
    """Return the image with Open MPI and ssh, but without Python."""
    dockerfile = HERE / "mpi_ssh.Dockerfile"

    def make(target: Path) -> None:
        build_image(MPI_SSH, dockerfile, [], target)

    return archive("mpi-ssh", hash_of(base_key(), dockerfile), make)


def training() -> Path:
    """Return the image with two MPIs, numba-cuda and the model server, at the locked versions."""
    return locked_image("training", TRAINING, "--only-group", "training", files=[MODEL_SERVER])


def notebook() -> Path:
    """Return the image with JupyterLab and numba-cuda, at the locked versions."""
    groups = ("--no-default-groups", "--extra", "notebook", "--group", "clients")
    return locked_image("notebook", NOTEBOOK, *groups, keep=1)


def locked_image(
    name: str, tag: str, *selection: str, files: Sequence[Path] = (), keep: int = 2
) -> Path:
    """Return the image of NAME.Dockerfile, which installs NAME.txt.

    Args:
        name: the image's.
        tag: its full name.
        selection: uv's options for the packages of the lock file that NAME.txt lists.
        files: what it copies, too.
        keep: how many versions of the archive are kept.
    """
    dockerfile = HERE / f"{name}.Dockerfile"
    export = ("export", "--quiet", "--frozen", "--no-header", "--no-emit-project")
    locked = uv(*export, *selection, "--project", str(REPOSITORY))

    def make(target: Path) -> None:
        with tempfile.TemporaryDirectory() as folder:
            requirements = Path(folder, f"{name}.txt")
            requirements.write_text(locked)
            # `make` has downloaded most of it before.
            build_image(tag, dockerfile, [requirements, *files], target, volume=uv_cache())

    return archive(name, hash_of(base_key(), dockerfile, locked, *files), make, keep=keep)


def frameworks() -> Path:
    """Return the image with TensorFlow and PyTorch, of more than a gigabyte."""
    dockerfile = HERE / "frameworks.Dockerfile"

    def make(target: Path) -> None:
        build_image(FRAMEWORKS, dockerfile, [], target, volume=uv_cache())

    return archive("frameworks", hash_of(base_key(), dockerfile), make, keep=1)


def contour() -> Path:
    """Return the image of Contour, and of Envoy, which it configures."""
    dockerfile = HERE / "contour.Dockerfile"

    def make(target: Path) -> None:
        build(CONTOUR_MODULE)
        program = CONTOUR_MODULE.directory() / "bin" / "contour"
        build_image(CONTOUR, dockerfile, [program], target, volume=uv_cache())

    return archive("contour", hash_of(base_key(), dockerfile, CONTOUR_MODULE.key()), make, keep=1)


def uv_cache() -> str:
    """Return the volume that lets a Dockerfile's uv use this machine's downloads."""
    return f"{uv('cache', 'dir').strip()}:/root/.cache/uv"


def uv(*arguments: str) -> str:
    """Return the output of uv, as `make` has installed it."""
    tools = REPOSITORY / ".tools" / "bin" / "uv"
    return run_checked([str(tools) if tools.exists() else "uv", *arguments], timeout=300)


def main() -> int:
    """Build the missing images and print all."""
    try:
        image_store()
        for path in all_images():
            print(f"{path.stat().st_size / 1e6:6.1f} MB  {path}")
    except (ClusterError, BuildError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
