"""Fill the slice, then free and allocate memory again until stdin closes.

With the argument `forever` the program ignores its stdin, since a container's is closed from the start. With
the argument `heir` it starts a child without exec, which keeps the driver's descriptors and outlives it until
stdin closes.

It prints one JSON object per line with the state of each visible card. `total` is the MiB that the driver API
reports. `got` is the MiB that could be allocated. `lost` follows if freed memory could not be allocated
again. `heir` is the child's PID. It uses ctypes on the driver API, as the simplest possible client.
"""

import ctypes
import json
import os
import select
import sys

MIB = 1 << 20
PERIOD_S = 0.05


class Card:
    """One device, with its primary context."""

    def __init__(self, cuda: ctypes.CDLL, ordinal: int) -> None:
        self.cuda = cuda
        self.blocks: list[tuple[ctypes.c_uint64, int]] = []
        self.context = ctypes.c_void_p()
        device = ctypes.c_int()
        cuda.cuDeviceGet(ctypes.byref(device), ordinal)
        if result := cuda.cuDevicePrimaryCtxRetain(ctypes.byref(self.context), device):
            raise OSError(f"no context: {result}")

    def total(self) -> int:
        """Return the total MiB of the device."""
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        self.cuda.cuCtxSetCurrent(self.context)
        self.cuda.cuMemGetInfo_v2(ctypes.byref(free), ctypes.byref(total))
        return total.value // MIB

    def allocate(self, mib: int) -> bool:
        """Allocate one block; return whether that succeeded."""
        pointer = ctypes.c_uint64()
        self.cuda.cuCtxSetCurrent(self.context)
        if self.cuda.cuMemAlloc_v2(ctypes.byref(pointer), ctypes.c_size_t(mib * MIB)):
            return False
        self.blocks.append((pointer, mib))
        return True

    def fill(self) -> int:
        """Allocate until nothing is left; return the allocated MiB."""
        for mib in (512, 64, 8, 1):
            while self.allocate(mib):
                pass
        return sum(mib for _, mib in self.blocks)

    def reallocate(self) -> bool:
        """Free the last block and allocate it again; return whether that succeeded."""
        pointer, mib = self.blocks.pop()
        self.cuda.cuCtxSetCurrent(self.context)
        self.cuda.cuMemFree_v2(pointer)
        return self.allocate(mib)


def report(**values: object) -> None:
    """Print the values as one line of JSON."""
    print(json.dumps(values), flush=True)


def start_heir() -> int:
    """Start the child, and return its PID."""
    if child := os.fork():
        return child
    while sys.stdin.read(1):
        pass
    os._exit(0)


def main() -> None:
    """Fill all cards, report, then free and allocate until stdin closes."""
    cuda = ctypes.CDLL("libcuda.so.1")
    if result := cuda.cuInit(0):
        report(error=f"cuInit: {result}")
        return
    count = ctypes.c_int()
    cuda.cuDeviceGetCount(ctypes.byref(count))
    cards = [Card(cuda, ordinal) for ordinal in range(count.value)]
    got = [card.fill() for card in cards]
    heir = {"heir": start_heir()} if "heir" in sys.argv else {}
    report(total=[card.total() for card in cards], got=got, **heir)
    watched = [] if "forever" in sys.argv else [sys.stdin]
    while not select.select(watched, [], [], PERIOD_S)[0]:
        if not all(card.reallocate() for card in cards):
            report(lost=True)
            return


if __name__ == "__main__":
    main()
