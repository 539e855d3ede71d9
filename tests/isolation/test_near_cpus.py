"""The CPUs that are nearest to a lease's cards, as text."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fenka.core.inventory import DeviceId
from fenka.core.request import Slice
from fenka.isolation.lease_files import near_cpus, parse_cpus


def on(*devices: str) -> list[Slice]:
    """A slice of each of these cards or instances."""
    return [Slice(0, DeviceId(device), 1024, 0) for device in devices]


NEAR = {"GPU-0": {0, 1, 2, 8, 9}, "GPU-1": {4}, "GPU-2": set[int]()}


@pytest.mark.parametrize(
    ("devices", "text"),
    [
        (["GPU-0"], "0-2,8-9"),
        (["GPU-1"], "4"),
        # Those of all cards.
        (["GPU-0", "GPU-1"], "0-2,4,8-9"),
        # An instance is near what its card is near.
        (["GPU-1/0/1g.5gb"], "4"),
        (["GPU-2"], ""),
        (["GPU-gone"], ""),
        ([], ""),
    ],
)
def test_cpus_are_listed_as_linux_does(devices: list[str], text: str) -> None:
    """As `taskset -c` takes them; empty if the driver cannot tell."""
    assert near_cpus(on(*devices), NEAR) == text


@given(st.sets(st.integers(0, 1023)))
def test_list_is_read_back(cpus: set[int]) -> None:
    """Any CPUs."""
    assert parse_cpus(near_cpus(on("GPU-0"), {"GPU-0": cpus})) == cpus
