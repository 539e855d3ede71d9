"""A clean Debian 12: its files are cached, and each command sees a fresh copy of them."""

import fcntl
import os
import shutil
import subprocess
from collections.abc import Iterable
from pathlib import Path

from e2e.programs import cache

PACKAGES = "ca-certificates,man-db,pipx,python3,python3-venv"
USER = "ada"
CERTIFICATES = Path("etc", "ssl", "certs", "ca-certificates.crt")

# A root by pivot_root, since the kernel refuses user namespaces below a chroot.
_ENTER = """
set -e
base=$1 work=$2 given=$PWD; shift 2
mount -t tmpfs tmpfs "$work"
mkdir "$work/upper" "$work/work" "$work/root"
mount -t overlay overlay -o "lowerdir=$base,upperdir=$work/upper,workdir=$work/work" "$work/root"
cd "$work/root"
mount -t proc proc proc
mount --rbind /dev dev
mount --rbind /sys sys
mount -t tmpfs tmpfs run
mount -t tmpfs tmpfs tmp
chmod 1777 tmp
mkdir -p srv/given old
cp -R "$given/." srv/given
pivot_root . old
cd /
umount -l old
exec "$@"
"""


def debian_root() -> Path:
    """Return a minimal Debian 12 with Python, without compiler and git, and with an ordinary user.

    It is made by debootstrap if it is missing, in a minute.
    """
    root = cache() / "debian-12-root"
    with (cache() / "debian-12-root.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not root.exists():
            fresh = root.with_suffix(".new")
            shutil.rmtree(fresh, ignore_errors=True)
            # Its mounts end with it, and the lock is held as long as it runs.
            command = ["unshare", "--mount", "debootstrap", "--variant=minbase"]
            command += [f"--include={PACKAGES}", "bookworm", str(fresh)]
            subprocess.run(command, check=True, capture_output=True, pass_fds=[lock.fileno()])
            subprocess.run(["chroot", str(fresh), "useradd", "--create-home", USER], check=True)
            # A proxy may intercept TLS.
            shutil.copy(Path("/") / CERTIFICATES, fresh / CERTIFICATES)
            shutil.rmtree(fresh / "var" / "cache" / "apt")
            fresh.rename(root)
    for name in ("resolv.conf", "hosts"):
        shutil.copy(Path("/etc") / name, root / "etc" / name)
    return root


def run_in_debian(
    script: str, files: Iterable[Path], folder: Path, user: str = USER
) -> subprocess.CompletedProcess[str]:
    """Run a script with a fresh copy of the root, where these files are in /srv/given.

    Args:
        script: for bash, which ends at the first error.
        files: copied into the root.
        folder: an empty one for the mounts.
        user: runs the script in its home directory.
    """
    given, work = folder / "given", folder / "work"
    given.mkdir()
    work.mkdir()
    for path in files:
        shutil.copy(path, given / path.name)
    namespaces = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "--propagation=private"]
    login = [
        "runuser",
        "-l",
        user,
        "-s",
        "/bin/bash",
        "-c",
        f"export PIP_CERT=/{CERTIFICATES}; set -e; {script}",
    ]
    return subprocess.run(
        [*namespaces, "sh", "-c", _ENTER, "enter", str(debian_root()), str(work), *login],
        cwd=given,
        env={"PATH": os.environ["PATH"]},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
