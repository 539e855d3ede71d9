"""The base class of all exceptions that fenka raises, and the exit codes of its commands."""

from collections.abc import Sequence

FAILURE = 1
INVALID_INPUT = 2
TEMPORARY_FAILURE = 75
"""EX_TEMPFAIL of sysexits.h: the same command may succeed later."""
NOT_EXECUTABLE = 126
PROGRAM_NOT_FOUND = 127
"""As in shells."""
INTERRUPTED = 130
"""128 + SIGINT, as in shells."""


class FenkaError(Exception):
    """An expected failure. Its message is one sentence that a user can act on."""

    exit_code: int = FAILURE
    """Exit code of a command that ends with this error."""


class InvalidCase(FenkaError):
    """A case contradicts itself or has a value that nothing can have; the message names the field."""

    exit_code = INVALID_INPUT


def listed(names: Sequence[str], most: int) -> str:
    """Return the first names for a sentence, and how many more there are."""
    more = len(names) - most
    return ", ".join(names[:most]) + (f" and {more} more" if more > 0 else "")
