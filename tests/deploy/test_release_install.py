"""Install a release's wheels on clean systems, as people do. Runs with FENKA_E2E_TIER=full, as root."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from deploy.release import wheels
from deploy.release.recipe import Release
from fenka import __version__
from tests.deploy import foreign_directory
from tests.deploy.debian_root import run_in_debian

pytestmark = [
    pytest.mark.skipif(
        os.environ.get("FENKA_E2E_TIER") != "full"
        or os.geteuid() != 0
        or not shutil.which("debootstrap"),
        reason="a scenario of the second tier: FENKA_E2E_TIER=full, root and debootstrap",
    ),
    pytest.mark.timeout(900),
]

INSTALL = """
! command -v gcc cc make git
python3 -m venv fenka
SECONDS=0
fenka/bin/pip install --quiet --disable-pip-version-check /srv/given/fenka-*.whl
echo "installed in $SECONDS s"
PATH=$PWD/fenka/bin:$PATH
"""

FIRST_MINUTE = """
fenka daemon --background --simulate T4
fenka run --gpu-mem 4 --name first -d -- sleep 60
fenka ps
fenka top node -s
fenka why first
fenka doctor || true
man -P cat fenka-run | grep -- --gpu-mem
kubectl-fenka --version
fenka stop first
fenka daemon --stop
"""


@pytest.fixture(scope="module")
def release(tmp_path_factory: pytest.TempPathFactory) -> Release:
    """Provide the wheels and the sdist of this checkout."""
    made = Release(tmp_path_factory.mktemp("dist"))
    wheels.build_wheels(made)
    wheels.build_sdist(made)
    return made


def test_demo_runs_for_an_ordinary_user_after_pip_install(release: Release, tmp_path: Path) -> None:
    """The wheel brings all that it needs: no compiler, no Jupyter, no checkout."""
    script = f"{INSTALL}\nfenka demo --check\n"
    done = run_in_debian(script, [release.wheel("x86_64")], tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    print(*(line for line in done.stdout.splitlines() if line.startswith("installed in")))
    assert "training-3 is refused beyond it" in done.stdout
    assert "\nAll checks passed.\n" in done.stdout


def test_first_commands_and_the_manual_work_after_pip_install(
    release: Release, tmp_path: Path
) -> None:
    """`man` finds the pages of a virtual environment that is on PATH."""
    done = run_in_debian(INSTALL + FIRST_MINUTE, [release.wheel("x86_64")], tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "4/14" in done.stdout
    assert f"fenka {__version__}" in done.stdout
    assert "first: stopped" in done.stdout


def test_directory_of_another_user_changes_nothing(release: Release, tmp_path: Path) -> None:
    """Neither the daemon that is started there, nor the commands, use a file of the directory's."""
    daemon = "cd /tmp/foreign; fenka daemon --background --simulate T4; cd"
    script = f"{INSTALL}{foreign_directory.MAKE}{daemon}{foreign_directory.USE}fenka daemon --stop"
    done = run_in_debian(script, [release.wheel("x86_64")], tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "\n4308 MiB\n" in done.stdout
    assert "\nno foreign code ran\njson" in done.stdout


def test_pipx_installs_the_commands_and_the_manual(release: Release, tmp_path: Path) -> None:
    """People without a virtual environment of their own use it."""
    script = "pipx install /srv/given/fenka-*.whl\n.local/bin/fenka demo --check\nls .local/bin"
    done = run_in_debian(script, [release.wheel("x86_64")], tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "All checks passed." in done.stdout
    assert {"fenka", "kubectl-fenka", "kubectl-inspect-gpushare"} <= set(done.stdout.split())


def test_sdist_says_what_is_missing_when_it_cannot_compile(
    release: Release, tmp_path: Path
) -> None:
    """FENKA_WHEEL_NATIVE=none installs it without the libraries."""
    script = """
python3 -m venv fenka
archive=/srv/given/fenka-*.tar.gz
! fenka/bin/pip install --disable-pip-version-check --no-deps $archive
FENKA_WHEEL_NATIVE=none fenka/bin/pip install --disable-pip-version-check $archive
! fenka/bin/fenka demo
"""
    sdist = release.into / f"fenka-{release.version}.tar.gz"
    done = run_in_debian(script, [sdist], tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "the native libraries could not be built" in done.stdout + done.stderr
    assert "this fenka has no native libraries" in done.stderr
    assert "Traceback" not in done.stderr.partition("fenka: ")[2]


def test_sdist_compiles_the_libraries_of_the_wheel(release: Release, tmp_path: Path) -> None:
    """With `make`; the compiler and NVIDIA's headers are packages of PyPI."""
    sdist = release.into / f"fenka-{release.version}.tar.gz"
    build = [sys.executable, "-m", "venv", str(tmp_path / "venv")]
    subprocess.run(build, check=True)
    pip = [str(tmp_path / "venv" / "bin" / "pip"), "wheel", "--quiet", "--no-deps"]
    subprocess.run([*pip, "-w", str(tmp_path / "built"), str(sdist)], check=True)
    (compiled,) = (tmp_path / "built").iterdir()
    assert compiled.name == release.wheel("x86_64").name
    for name, wheel in (("ours", release.wheel("x86_64")), ("theirs", compiled)):
        shutil.unpack_archive(wheel, tmp_path / name, "zip")
    libraries = ["diff", "-r", "ours/fenka/_native", "theirs/fenka/_native"]
    subprocess.run(libraries, cwd=tmp_path, check=True)


LOADER = """
#include <dlfcn.h>
#include <stdio.h>
int main(int count, char **paths) {
  for (int i = 1; i < count; i++) {
    void *library = dlopen(paths[i], RTLD_NOW | RTLD_LOCAL);
    if (!library) { puts(dlerror()); return 1; }
    printf("%d\\n", dlsym(library, "cuInit") || dlsym(library, "nvmlInit_v2"));
  }
}
"""


def test_libraries_for_aarch64_load_on_an_emulated_processor(
    release: Release, tmp_path: Path
) -> None:
    """tests/native/test_shim_aarch64.py runs clients with the same sources."""
    libc = Path("/usr/aarch64-linux-gnu")
    if not shutil.which("qemu-aarch64") or not libc.exists():
        pytest.skip("no emulated aarch64 here (Debian: qemu-user and libc6-arm64-cross)")
    shutil.unpack_archive(release.wheel("aarch64"), tmp_path, "zip")
    native = tmp_path / "fenka" / "_native"
    loader = tmp_path / "loader"
    (tmp_path / "loader.c").write_text(LOADER)
    compiler = [sys.executable, "-m", "ziglang", "cc", "-target", "aarch64-linux-gnu.2.17"]
    subprocess.run([*compiler, "-o", loader, str(loader) + ".c", "-ldl"], check=True)
    libraries = [native / "libfenka.so", *(native / "simulated").glob("lib*.so.1")]
    emulated = ["qemu-aarch64", "-L", str(libc), str(loader), *map(str, libraries)]
    done = subprocess.run(emulated, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "1\n" * 3), done.stdout + done.stderr
