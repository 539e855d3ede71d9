"""Print what the driver says of its cards and of who is on them, as one JSON object.

By NVML's own Python bindings, in a process of its own: a card server that is killed takes the library's state
along. `{"uuid": {"total": MiB, "used": MiB, "processes": {"pid": MiB}}}`
"""

import json
import sys

import pynvml

MIB = 1 << 20


def main() -> None:
    """Exit code 1 while no driver answers."""
    try:
        pynvml.nvmlInit()
        cards = {}
        for index in range(pynvml.nvmlDeviceGetCount()):
            card = pynvml.nvmlDeviceGetHandleByIndex(index)
            memory = pynvml.nvmlDeviceGetMemoryInfo(card)
            cards[pynvml.nvmlDeviceGetUUID(card)] = {
                "total": memory.total // MIB,
                "used": memory.used // MIB,
                "processes": {
                    process.pid: (process.usedGpuMemory or 0) // MIB
                    for process in pynvml.nvmlDeviceGetComputeRunningProcesses(card)
                },
            }
    except pynvml.NVMLError as error:
        print(error, file=sys.stderr)
        sys.exit(1)
    print(json.dumps(cards))


if __name__ == "__main__":
    main()
