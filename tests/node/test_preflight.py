"""Preflight checks: the default runtime, mount propagation, units, and options."""

import subprocess
import sys
from pathlib import Path

import pytest

from fenka.formats.quantities import InvalidSize
from fenka.node import main
from fenka.node.config import NodeConfig
from fenka.node.main import (
    PreflightError,
    check_executable,
    check_kubelet,
    check_mounts,
    check_runtime,
    check_unit,
    nvidia_by_default,
)
from tests.node.harness import card

V2 = """version = 2
[plugins."io.containerd.grpc.v1.cri".containerd]
default_runtime_name = "nvidia"
"""
V3 = """version = 3
[plugins."io.containerd.cri.v1.runtime".containerd]
default_runtime_name = "nvidia"
"""
IMPORTS = 'version = 3\nimports = ["/etc/containerd/conf.d/*.toml"]\n'
NVIDIA = "etc/nvidia-container-runtime/config.toml"
NEVER = "accept-nvidia-visible-devices-envvar-when-unprivileged = false\n"


@pytest.mark.parametrize(
    ("files", "where"),
    [
        ({"etc/containerd/config.toml": V2}, "/etc/containerd/config.toml"),
        ({"etc/containerd/config.toml": V3, NVIDIA: ""}, "/etc/containerd/config.toml"),
        (
            {"etc/containerd/config.toml": IMPORTS, "etc/containerd/conf.d/99-nvidia.toml": V3},
            "/etc/containerd/conf.d/99-nvidia.toml",
        ),
        (
            {"etc/crio/crio.conf.d/9.conf": '[crio.runtime]\ndefault_runtime = "nvidia"\n'},
            "/etc/crio/crio.conf.d/9.conf",
        ),
        ({"etc/containerd/config.toml": V3, NVIDIA: NEVER}, None),
        ({"etc/containerd/config.toml": V3.replace("nvidia", "runc")}, None),
        ({"etc/containerd/config.toml": "not toml", NVIDIA: "nor = = this"}, None),
        ({}, None),
    ],
)
def test_nvidia_by_default_warns_when_images_could_get_all_cards(
    tmp_path: Path, files: dict[str, str], where: str | None
) -> None:
    """The warning names the file, and what to write where."""
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    warning = nvidia_by_default(tmp_path)
    if where is None:
        assert warning is None
        return
    assert warning is not None
    assert f"({where})" in warning
    assert "unprivileged = false in /etc/nvidia-container-runtime/config.toml" in warning


def proc(path: Path, namespace: str, *mounts: str) -> Path:
    """A /proc of a process in a mount namespace, the machine's being 1."""
    for process, its in (("self", namespace), ("1", "1")):
        (path / process / "ns").mkdir(parents=True)
        (path / process / "ns" / "mnt").symlink_to(f"mnt:[{its}]")
    (path / "self" / "mountinfo").write_text("".join(f"{line}\n" for line in mounts))
    return path


def test_check_mounts_rejects_mounts_when_the_node_does_not_see_them(tmp_path: Path) -> None:
    """That is so in a container without Bidirectional propagation."""
    root = "1 0 0:1 / / rw - overlay overlay rw"
    private = "2 1 0:2 / /run/fenka rw - tmpfs tmpfs rw"
    shared = "2 1 0:2 / /run/fenka rw shared:7 - tmpfs tmpfs rw"
    slave = "2 1 0:2 / /run/fenka rw master:7 - tmpfs tmpfs rw"
    leases = Path("/run/fenka/leases")
    for number, mount in enumerate((private, slave, root)):
        sentence = "mount /run/fenka with mountPropagation Bidirectional"
        with pytest.raises(PreflightError, match=sentence):
            check_mounts(leases, proc(tmp_path / str(number), "2", root, mount))
    check_mounts(leases, proc(tmp_path / "good", "2", root, shared))
    check_mounts(leases, proc(tmp_path / "over", "2", root, private, shared))
    check_mounts(leases, proc(tmp_path / "host", "1", root))


@pytest.mark.parametrize(
    ("version", "assumed", "served"),
    [
        ("containerd://2.4.2", False, True),
        ("containerd://v2.0.0+unknown", False, True),
        ("containerd://1.7.27", False, False),
        ("containerd://1.7.27", True, True),
        ("containerd://1.6.20~ds1", True, False),
        ("cri-o://1.33.0", False, True),
        ("docker://27.1.0", False, False),
        ("something", False, True),
    ],
)
def test_check_runtime_rejects_runtimes_that_ignore_cdi(
    version: str, assumed: bool, served: bool
) -> None:
    """The sentence names a version that works."""
    if served:
        check_runtime(version, assume_cdi=assumed)
        return
    with pytest.raises(PreflightError, match=r"containerd 2\.0"):
        check_runtime(version, assume_cdi=assumed)


@pytest.mark.parametrize("version", ["v1.29.0", "v1.37.1", "v1.33.4-eks-1234567", "", "unknown"])
def test_check_kubelet_accepts_kubelets_that_pass_cdi_devices_on(version: str) -> None:
    """A version that cannot be read is no reason to refuse a node."""
    check_kubelet(version)


def test_check_kubelet_rejects_kubelets_that_drop_cdi_devices() -> None:
    """The sentence names a version that works."""
    with pytest.raises(PreflightError, match=r"v1\.28\.15 silently ignores.*use Kubernetes 1\.29"):
        check_kubelet("v1.28.15")


def test_check_unit_rejects_units_when_their_list_is_too_long() -> None:
    """The sentence names a unit that works."""
    cards = [card(n, 81251) for n in range(8)]
    with pytest.raises(PreflightError, match="use --unit 4MiB or larger"):
        check_unit(cards, 1)
    check_unit(cards, 4)
    with pytest.raises(PreflightError, match="smaller --unit"):
        check_unit(cards, 1 << 20)


def test_run_rejects_options_before_anything_is_changed() -> None:
    """The sentence names what is valid."""
    with pytest.raises(InvalidSize, match="'3' is no unit: use GiB"):
        main.run(NodeConfig("n", unit="3"))


def test_a_directory_of_which_no_library_can_be_loaded_is_refused(tmp_path: Path) -> None:
    """The sentence names the chart's value. The file system is mounted in a namespace of its own."""
    check_executable(tmp_path)
    program = (
        "import sys; from pathlib import Path; from fenka.node.main import PreflightError, check_executable\n"
        "try: check_executable(Path(sys.argv[1]))\n"
        "except PreflightError as error: print(error)"
    )
    script = 'mount -t tmpfs -o noexec none "$1" && exec "$2" -c "$3" "$1"'
    apart = ("unshare", "--user", "--map-root-user", "--mount", "sh", "-c", script, "sh")
    command = [*apart, str(tmp_path), sys.executable, program]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert f"{tmp_path} is on a file system that is mounted noexec" in done.stdout
    assert "node.stateDir (--state)" in done.stdout
