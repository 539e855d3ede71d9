"""The level of a program's log: an option of each program that runs in a cluster."""

import logging
from typing import Annotated, Literal

from msgspec import Meta

LogLevel = Annotated[
    Literal["error", "warning", "info", "debug"],
    Meta(
        description="debug: also log each request and its answer",
        extra={"envvar": "FENKA_LOG_LEVEL"},
    ),
]


def start_log(level: LogLevel, *, times: bool = True) -> None:
    """Log to standard error from now on. Libraries log from `info`, whatever the level."""
    form = "%(levelname)s %(message)s"
    logging.basicConfig(level=logging.INFO, format=f"%(asctime)s {form}" if times else form)
    logging.getLogger("fenka").setLevel(level.upper())
