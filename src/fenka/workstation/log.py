"""The daemon's log: one line for each entry, on standard error."""

import asyncio
import sys
import traceback
from pathlib import Path
from typing import Any


def log(message: str) -> None:
    """Print one line, shortened if it is very long."""
    print(f"fenka daemon: {message!s:.2000}".replace("\n", " "), file=sys.stderr, flush=True)


def log_unhandled(_: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Log in one line what asyncio would print as a traceback; for its exception handler."""
    error = context.get("exception")
    log(f"{context['message']}: {describe(error)}" if error else context["message"])


def describe(error: BaseException) -> str:
    """Return the exception's type, message and the source line that raised it."""
    frames = traceback.extract_tb(error.__traceback__)
    at = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {error}{at}"
