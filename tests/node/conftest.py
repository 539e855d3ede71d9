"""What all tests of the node program share."""

from pathlib import Path

import pytest

from tests.node.harness import installed


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The native libraries, prepared for leases."""
    return installed(tmp_path_factory.mktemp("native"))
