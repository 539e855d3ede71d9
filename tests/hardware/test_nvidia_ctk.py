"""NVIDIA's nvidia-ctk, built from its Go module, generates a CDI specification of simulated instances."""

import fcntl
import os
import shutil
import subprocess
from pathlib import Path

import pynvml
import pytest
import yaml

from fenka.hardware import host_tree
from fenka.hardware.card_spec import parse_spec
from fenka.hardware.nvml import Driver
from fenka.hardware.simulated_node import SimulatedNode
from tests.hardware.test_go_nvml import NO_NETWORK

MODULE = "github.com/NVIDIA/nvidia-container-toolkit/cmd/nvidia-ctk@v1.20.0"
BUILT_WITHIN_S = 110


@pytest.fixture(scope="module")
def ctk() -> Path:
    """Return the program, which is built once into a cache directory."""
    go = shutil.which("go")
    if go is None or os.geteuid() != 0:
        pytest.skip("it needs go, and root for a mount namespace")
    own = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    cache = Path(os.environ.get("FENKA_TEST_CACHE") or own) / "fenka-tests" / "nvidia-ctk"
    cache.mkdir(parents=True, exist_ok=True)
    with (cache / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (cache / "nvidia-ctk").exists():
            _build(go, cache)
    return cache / "nvidia-ctk"


def _build(go: str, cache: Path) -> None:
    environment = {**os.environ, "GOBIN": str(cache), "GOFLAGS": "", "GOTOOLCHAIN": "local"}
    try:
        done = subprocess.run(
            [go, "install", MODULE],
            env=environment,
            capture_output=True,
            text=True,
            timeout=BUILT_WITHIN_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        pytest.skip(f"nvidia-ctk was not built within {BUILT_WITHIN_S} s")
    if done.returncode != 0 and any(sign in done.stderr for sign in NO_NETWORK):
        pytest.skip("its modules cannot be fetched here")
    assert done.returncode == 0, done.stderr


@pytest.mark.timeout(200)
def test_specification_names_the_capabilities_of_two_cards(ctk: Path, tmp_path: Path) -> None:
    """Each instance needs its card, and the files of its GPU and compute instance by the driver's formula."""
    cards, tree = parse_spec("A100-40G*2"), tmp_path / "tree"
    host_tree.write(tree, tmp_path / "node", cards)
    node = SimulatedNode.create(tmp_path / "node", cards)
    node.start()
    try:
        with Driver.open(node.library_dir):
            for index, profile, compute in ((0, 9, 2), (1, 19, 0)):
                card = pynvml.nvmlDeviceGetHandleByIndex(index)
                pynvml.nvmlDeviceSetMigMode(card, 1)
                gpu = pynvml.nvmlDeviceCreateGpuInstance(card, profile)
                pynvml.nvmlGpuInstanceCreateComputeInstance(gpu, compute)
        devices = _generate(ctk, node, tree)
    finally:
        node.stop()
    assert devices["0:0"] == ["nvidia0", "nvidia-cap21", "nvidia-cap22"]
    assert devices["1:0"] == ["nvidia1", "nvidia-cap255", "nvidia-cap256"]


def _generate(ctk: Path, node: SimulatedNode, tree: Path) -> dict[str, list[str]]:
    """Return the device nodes of each device of the specification."""
    command = (
        f"{ctk} cdi generate --mode nvml --dev-root {tree} --library-search-path {node.library_dir}"
    )
    done = subprocess.run(
        ["unshare", "-m", "sh", "-c", f"mount --bind {tree}/proc/driver /proc/driver && {command}"],
        env={
            "PATH": os.environ["PATH"],
            "LD_LIBRARY_PATH": str(node.library_dir),
            "FENKA_SIMULATED_NODE": str(node.directory),
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    specification = yaml.safe_load(done.stdout)
    return {
        device["name"]: [
            Path(entry["path"]).name for entry in device["containerEdits"]["deviceNodes"]
        ]
        for device in specification["devices"]
    }
