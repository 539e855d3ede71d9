"""Asks PyTorch's allocator for more than is free, and then for half of it. Prints one JSON line.

`fenka doctor --hardware` runs this file with the Python that has PyTorch, which need not have fenka.
"""

import json

try:
    import torch
except ImportError:
    print(json.dumps({"missing": True}))
    raise SystemExit(0) from None


def granted(size: int) -> bool:
    """Return whether so many bytes are granted, and give them back."""
    try:
        torch.empty(size, dtype=torch.uint8, device="cuda")
    except torch.cuda.OutOfMemoryError:
        return False
    torch.cuda.empty_cache()
    return True


try:
    free, total = torch.cuda.mem_get_info()
    answer = {
        "version": torch.__version__,
        "free": free,
        "total": total,
        "beyond": granted(free + 1),
        "half": granted(free // 2),
        "beyond_again": granted(free + 1),
    }
except RuntimeError as why:
    answer = {"error": str(why).splitlines()[0]}
print(json.dumps(answer))
