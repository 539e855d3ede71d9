"""Install the released plugins of kubectl by krew, and look at the cluster through them."""

import os
import platform
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from deploy.release import krew, wheels
from deploy.release.recipe import PROCESSORS, Release
from e2e.programs import KREW, build
from e2e.scenarios.installation import MEMORY, Installation
from fenka import __version__

NODE = "sd-cluster-04"


@pytest.mark.full
@pytest.mark.timeout(900)
def test_plugins_look_at_the_cluster_when_krew_has_installed_them(
    installation: Installation, tmp_path: Path
) -> None:
    """The archives need nothing but Python; krew checks digests, names and the manifests' fields."""
    processor = platform.machine()
    release = Release(tmp_path / "dist", (processor,))
    release.into.mkdir()
    wheels.build_wheels(Release(release.into, (), release.work))
    krew.build_plugins(release)
    build(KREW)
    name = f"kubectl-fenka-{__version__}-linux-{PROCESSORS[processor]}.tar.gz"
    archive = f"--archive={release.into / name}"
    for plugin in ("fenka", "inspect-gpushare"):
        manifest = f"--manifest={release.into / plugin}.yaml"
        subprocess.run(
            [KREW.directory() / "bin" / "krew", "install", manifest, archive],
            env={**os.environ, "KREW_ROOT": str(tmp_path / "krew")},
            stdin=subprocess.DEVNULL,
            check=True,
        )
    kubectl = plugin_runner(installation, tmp_path)
    installation.label(NODE, "gpushare=true")
    installation.wait_for_allocatable(NODE, MEMORY, 14)
    assert kubectl("fenka", "--version").strip() == f"fenka {__version__}"
    assert NODE in kubectl("fenka", "top", "node", "-s")
    assert NODE in kubectl("inspect-gpushare")
    assert kubectl("fenka", "queue", "--cluster")


def plugin_runner(installation: Installation, folder: Path) -> Callable[..., str]:
    """Return a function that runs kubectl with the installed plugins."""
    cluster = installation.cluster
    path = f"{folder / 'krew' / 'bin'}:{cluster.environment()['PATH']}"

    def run(*words: str) -> str:
        return cluster.run("kubectl", *words, environment={"PATH": path})

    return run
