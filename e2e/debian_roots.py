"""Install fenka's wheel in other Debians, with their Python and C library, and run the demo's checks there.

``python -m e2e.debian_roots trixie sid`` makes each root by debootstrap in the cache, once. It needs root and
records each run (tools/where_it_runs.py).
"""

import os
import subprocess
import sys
from pathlib import Path

from e2e import artifacts
from e2e.image_files import run_checked
from e2e.programs import cache
from tools.where_it_runs import Tried, record

PACKAGES = "python3,python3-venv,ca-certificates"
TESTS = "wheel installed without a compiler, `fenka demo --check`"
SETTINGS = ("etc/resolv.conf", "etc/pip.conf", "etc/ssl/certs/ca-certificates.crt")
"""This machine's files with which pip reaches its index."""
# Arguments: the root, the folder of the wheel, the command.
INSIDE = """
root=$1 wheel=$2; shift 2
mount --make-rprivate /
mount --bind "$root" "$root"
mount -t proc proc "$root/proc"
mount --rbind /dev "$root/dev"
mount -t sysfs sysfs "$root/sys"
for folder in tmp run; do mount -t tmpfs "$folder" "$root/$folder"; done
mkdir "$root/run/wheel"
mount --bind "$wheel" "$root/run/wheel"
exec chroot "$root" sh -euc "$@"
"""
CHECK = """
rm -rf /opt/tried
python3 -m venv /opt/tried
for wheel in /run/wheel/*.whl; do
  /opt/tried/bin/pip install --quiet --only-binary :all: "$wheel[notebook]"
done
PATH=/opt/tried/bin:$PATH fenka demo --check
"""
VERSIONS = """
python3 -c 'import platform as p; print(p.python_version(), *p.libc_ver())'
. /etc/os-release; echo "Debian ${VERSION_ID:-$VERSION_CODENAME}"
"""


def root_of(suite: str) -> Path:
    """Return the root of a Debian suite; make it first if it is missing."""
    root = cache() / f"debian-{suite}"
    if not (root / "complete").exists():
        run_checked(["rm", "-rf", str(root)])
        command = ["debootstrap", "--variant=minbase", f"--include={PACKAGES}", suite, str(root)]
        run_checked(command, timeout=1800)
        # Some versions leave them mounted.
        for mounted in ("proc", "sys"):
            subprocess.run(["umount", str(root / mounted)], check=False, capture_output=True)
        (root / "complete").touch()
    for name in SETTINGS:
        if Path("/", name).exists():
            (root / name).unlink(missing_ok=True)
            (root / name).write_bytes(Path("/", name).read_bytes())
    return root


def inside(root: Path, wheel: Path, script: str) -> subprocess.CompletedProcess[str]:
    """Run a shell script in a root, with a folder as /run/wheel."""
    command = ["unshare", "--mount", "--pid", "--fork", "--kill-child"]
    command += ["sh", "-euc", INSIDE, "sh", str(root), str(wheel), script]
    environment = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "LANG": "C.UTF-8", "HOME": "/root"}
    unseen = {"PIP_FIND_LINKS", "PIP_CACHE_DIR"}
    kept = {name: os.environ[name] for name in os.environ if name.startswith("PIP_")}
    kept = {name: value for name, value in kept.items() if name not in unseen}
    return subprocess.run(
        command, env=environment | kept, check=False, text=True, capture_output=True
    )


def check(suite: str, wheel: Path) -> bool:
    """Try one suite, record it, and return whether the checks passed."""
    root = root_of(suite)
    first, system = inside(root, wheel, VERSIONS).stdout.splitlines()
    python, libc, libc_version = first.split()
    done = inside(root, wheel, CHECK)
    parts = {
        "Python": python,
        "distribution": system,
        "C library": f"{libc} {libc_version}",
        "Linux": ".".join(os.uname().release.split(".")[:2]),
        "processor": os.uname().machine.replace("_", "-"),
    }
    record(Tried(parts, TESTS, int(not done.returncode), (suite,) if done.returncode else ()))
    print(done.stdout[-1500:], done.stderr[-1500:], sep="\n")
    print(f"{suite}: {parts}: {'failed' if done.returncode else 'passed'}", flush=True)
    return not done.returncode


def main() -> int:
    """Try the suites that are named."""
    wheel = artifacts.wheel().parent
    results = [check(suite, wheel) for suite in sys.argv[1:]]
    return int(not all(results))


if __name__ == "__main__":
    sys.exit(main())
