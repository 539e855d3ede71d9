"""A GPU program of the storm: fills its slice, then frees and takes again until its stdin closes.

With the argument `forever` it does not look at its stdin: a container's is closed from the beginning.

Prints one JSON object a line, with the state of each card that it sees. `total`: MiB as the driver API
reports them. `got`: MiB that could be allocated. Then `lost` if freed memory could not be allocated again.
Plain ctypes on the driver API, as the simplest of clients.
"""

import ctypes
import json
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
        """MiB of the device."""
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        self.cuda.cuCtxSetCurrent(self.context)
        self.cuda.cuMemGetInfo_v2(ctypes.byref(free), ctypes.byref(total))
        return total.value // MIB

    def take(self, mib: int) -> bool:
        """Allocate one block; whether that worked."""
        pointer = ctypes.c_uint64()
        self.cuda.cuCtxSetCurrent(self.context)
        if self.cuda.cuMemAlloc_v2(ctypes.byref(pointer), ctypes.c_size_t(mib * MIB)):
            return False
        self.blocks.append((pointer, mib))
        return True

    def fill(self) -> int:
        """Allocate until nothing is left; MiB."""
        for mib in (512, 64, 8, 1):
            while self.take(mib):
                pass
        return sum(mib for _, mib in self.blocks)

    def reallocate(self) -> bool:
        """Free the last block and take it again."""
        pointer, mib = self.blocks.pop()
        self.cuda.cuCtxSetCurrent(self.context)
        self.cuda.cuMemFree_v2(pointer)
        return self.take(mib)


def say(**words: object) -> None:
    """Print one line."""
    print(json.dumps(words), flush=True)


def main() -> None:
    """Fill, report, breathe."""
    cuda = ctypes.CDLL("libcuda.so.1")
    if result := cuda.cuInit(0):
        say(error=f"cuInit: {result}")
        return
    count = ctypes.c_int()
    cuda.cuDeviceGetCount(ctypes.byref(count))
    cards = [Card(cuda, ordinal) for ordinal in range(count.value)]
    got = [card.fill() for card in cards]
    say(total=[card.total() for card in cards], got=got)
    watched = [] if "forever" in sys.argv else [sys.stdin]
    while not select.select(watched, [], [], PERIOD_S)[0]:
        if not all(card.reallocate() for card in cards):
            say(lost=True)
            return


if __name__ == "__main__":
    main()
