"""Fixtures of the tests of the C libraries."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from fenka.isolation.control import Limit
from tests.native import shim_kit

MakeLease = Callable[..., shim_kit.Lease]


@pytest.fixture
def make_lease(tmp_path: Path) -> Iterator[MakeLease]:
    """Makes leases whose clients end with the test; given GiB for each of the first cards."""
    leases: list[shim_kit.Lease] = []

    def make(*gib: float, context_bytes: int = 0) -> shim_kit.Lease:
        limits = tuple(
            Limit(uuid, int(size * shim_kit.GIB), context_bytes)
            for uuid, size in zip(shim_kit.CARDS, gib, strict=False)
        )
        leases.append(shim_kit.Lease(tmp_path / f"lease{len(leases)}", limits))
        return leases[-1]

    yield make
    for lease in leases:
        lease.close()


@pytest.fixture
def lease(make_lease: MakeLease) -> shim_kit.Lease:
    """4 GiB of one card."""
    return make_lease(4)
