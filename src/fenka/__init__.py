"""fenka cuts GPUs into slices of memory and compute, and enforces them."""

__version__ = "0.2.0"
