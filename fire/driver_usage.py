"""Print the driver's cards and their processes as one JSON object.

It uses NVML's Python bindings in a separate process: a killed card server invalidates the library's state.
Format: `{"uuid": {"total": MiB, "used": MiB, "processes": {"pid": MiB}}}`.
"""

import json
import sys

import pynvml

MIB = 1 << 20


def main() -> None:
    """Print the object; exit with 1 if no driver answers."""
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
