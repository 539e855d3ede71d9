"""The messages' modules are what protoc makes of the .proto files today."""

import subprocess
import sys
from pathlib import Path

SOURCE = Path(__file__).parents[2] / "src"


def test_generated_modules_are_current(tmp_path: Path) -> None:
    """To regenerate: protoc -I src --python_out=src --pyi_out=src src/fenka/node/kubelet/*.proto"""
    protos = sorted((SOURCE / "fenka" / "node" / "kubelet").glob("*.proto"))
    out = [f"--python_out={tmp_path}", f"--pyi_out={tmp_path}"]
    subprocess.run(
        [sys.executable, "-m", "grpc_tools.protoc", f"-I{SOURCE}", *out, *protos], check=True
    )
    made = sorted((tmp_path / "fenka" / "node" / "kubelet").iterdir())
    assert len(made) == 2
    for path in made:
        assert path.read_text() == (SOURCE / "fenka" / "node" / "kubelet" / path.name).read_text()
