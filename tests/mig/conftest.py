"""What all tests of instances share."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from fenka.hardware.card_spec import parse_spec
from fenka.hardware.nvml import Driver
from fenka.hardware.simulated_node import SimulatedNode
from tests.mig.machine import Machine


@pytest.fixture(params=["A100-40G", "mirrored"])
def machine(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Machine]:
    """Return a machine with an A100, plain and with its halves exchanged in ids."""
    spec = request.param
    if spec == "mirrored":
        spec = str(tmp_path / "mirrored.toml")
        Path(spec).write_text('version = 1\n[[card]]\nmodel = "A100-40G"\nmig_mirrored = true\n')
    node = SimulatedNode.create(tmp_path / "node", parse_spec(spec))
    node.start()
    with Driver.open(node.library_dir) as driver:
        yield Machine(node, driver, tmp_path / "instances.json")
    node.stop()
