"""Fixtures of the tests of the C libraries."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from fenka.isolation.lease_control import Limit
from tests.native import clients

MakeLease = Callable[..., clients.Lease]


@pytest.fixture
def make_lease(tmp_path: Path) -> Iterator[MakeLease]:
    """Makes leases whose clients end with the test; given GiB for each of the first cards."""
    leases: list[clients.Lease] = []

    def make(*gib: float, context_bytes: int = 0) -> clients.Lease:
        limits = tuple(
            Limit(uuid, int(size * clients.GIB), context_bytes)
            for uuid, size in zip(clients.CARDS, gib, strict=False)
        )
        leases.append(clients.Lease(tmp_path / f"lease{len(leases)}", limits))
        return leases[-1]

    yield make
    for lease in leases:
        lease.close()


@pytest.fixture
def lease(make_lease: MakeLease) -> clients.Lease:
    """4 GiB of one card."""
    return make_lease(4)
