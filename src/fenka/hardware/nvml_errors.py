"""Errors of NVML: an answer that is not offered, a card that is lost, a driver that does not answer."""

import contextlib
from collections.abc import Callable, Iterator
from typing import TypeVar

import pynvml

_Value = TypeVar("_Value")

_CARD_LOST = (
    pynvml.NVML_ERROR_GPU_IS_LOST,
    pynvml.NVML_ERROR_TIMEOUT,
    pynvml.NVML_ERROR_RESET_REQUIRED,
)
"""The card does not answer until it is reset. The driver answers for the others."""

_DRIVER_LOST = (
    pynvml.NVML_ERROR_UNINITIALIZED,
    pynvml.NVML_ERROR_DRIVER_NOT_LOADED,
    pynvml.NVML_ERROR_LIBRARY_NOT_FOUND,
    pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH,
)
"""The driver does not answer for any card."""


def optional(query: Callable[..., _Value], *arguments: object) -> _Value | None:
    """Return the driver's answer; None if it, or this card, does not have one.

    No card reports everything, and what is missing differs by model, driver and container.
    Raises pynvml.NVMLError if the card or the driver is lost.
    """
    try:
        return query(*arguments)
    except pynvml.NVMLError as error:
        if is_lost(error):
            raise
        return None


@contextlib.contextmanager
def skip_lost_card() -> Iterator[None]:
    """Leave out the rest of what is read of a card that is lost."""
    try:
        yield
    except pynvml.NVMLError as error:
        if error.value not in _CARD_LOST:
            raise


def is_lost(error: pynvml.NVMLError) -> bool:
    """Return whether a card or the driver does not answer, rather than refuse an answer."""
    return error.value in (*_CARD_LOST, *_DRIVER_LOST)
