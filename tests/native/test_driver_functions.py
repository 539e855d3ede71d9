"""The functions of all drivers' headers are classified, and the page says so."""

import os
from pathlib import Path

import pytest

from tests.native.driver_functions import (
    GRAPHICS,
    PAGE,
    RELEASES,
    collect,
    declared,
    kind,
    load,
    page,
    unclassified,
)
from tests.native.test_shim_rows import HOOKS

network = pytest.mark.skipif(
    os.environ.get("FENKA_E2E_TIER") != "full", reason="needs the network: FENKA_E2E_TIER=full"
)


def test_every_function_of_every_driver_is_classified() -> None:
    """And none is missing: those of the installed header are the ones of its branch, and some of the next."""
    names = load()
    assert list(names) == [release.driver for release in RELEASES]
    assert not unclassified(names)
    known = {name for new in names.values() for name in new["cuda"]}
    assert set(HOOKS) - GRAPHICS <= known
    assert declared("#include <cuda.h>\n") <= known


def test_page_is_generated() -> None:
    """Run `python -m tests.native.driver_functions` after a change."""
    assert PAGE.read_text() == page(load())


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("cuMemAlloc_v2", "replaced"),
        ("cuMemAlloc_v3", "unknown"),
        ("cuCtxCreate_v5", "unknown"),
        ("cuHeapGrow", "unknown"),
        ("cuGraphAddNode_v3", "replaced"),
        ("cuGraphAddNode_v4", "unknown"),
        ("cuMemcpyHtoD_v2_ptds", "harmless"),
        ("nvmlDeviceGetMemoryInfo_v2", "replaced"),
        ("nvmlDeviceGetMemoryInfo_v3", "unknown"),
        ("nvmlDeviceGetRunningProcessDetailList", "replaced"),
        ("nvmlDeviceGetTemperatureV", "harmless"),
    ],
)
def test_new_versions_are_noticed(name: str, expected: str) -> None:
    """A function that a later driver adds is not let pass because an earlier version is known."""
    assert kind(name) == expected


@network
def test_headers_declare_what_is_committed(tmp_path: Path) -> None:
    """Fetch all packages again: NVIDIA may replace them, and the table must stay true."""
    assert collect(tmp_path) == load()
