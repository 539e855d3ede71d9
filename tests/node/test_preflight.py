"""What the node must be like: no cards handed out unasked, mounts that are seen."""

from pathlib import Path

import pytest

from fenka.node.preflight import nvidia_by_default, unseen_mounts

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
def test_a_runtime_that_hands_out_cards_unasked(
    tmp_path: Path, files: dict[str, str], where: str | None
) -> None:
    """The sentence names the file and what to write where."""
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    told = nvidia_by_default(tmp_path)
    if where is None:
        assert told is None
        return
    assert told is not None
    assert f"({where})" in told
    assert "unprivileged = false in /etc/nvidia-container-runtime/config.toml" in told


def proc(path: Path, namespace: str, *mounts: str) -> Path:
    """A /proc of a process in a mount namespace, the machine's being 1."""
    for process, its in (("self", namespace), ("1", "1")):
        (path / process / "ns").mkdir(parents=True)
        (path / process / "ns" / "mnt").symlink_to(f"mnt:[{its}]")
    (path / "self" / "mountinfo").write_text("".join(f"{it}\n" for it in mounts))
    return path


def test_mounts_that_the_node_does_not_see(tmp_path: Path) -> None:
    """In a container without Bidirectional; outside of one there is nobody else."""
    root = "1 0 0:1 / / rw - overlay overlay rw"
    private = "2 1 0:2 / /run/fenka rw - tmpfs tmpfs rw"
    shared = "2 1 0:2 / /run/fenka rw shared:7 - tmpfs tmpfs rw"
    slave = "2 1 0:2 / /run/fenka rw master:7 - tmpfs tmpfs rw"
    leases = Path("/run/fenka/leases")
    for number, mount in enumerate((private, slave, root)):
        told = unseen_mounts(leases, proc(tmp_path / str(number), "2", root, mount))
        assert told is not None
        assert "mountPropagation Bidirectional" in told
        assert "mount /run/fenka with" in told
    assert unseen_mounts(leases, proc(tmp_path / "good", "2", root, shared)) is None
    assert unseen_mounts(leases, proc(tmp_path / "over", "2", root, private, shared)) is None
    assert unseen_mounts(leases, proc(tmp_path / "host", "1", root)) is None
