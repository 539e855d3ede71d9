"""One sentence and an exit code for everything that is foreseen.

Exit codes: 2 bad input, 75 (EX_TEMPFAIL) nothing free now, 127 no such program, 130 interrupted, 1 else.
"""

import contextlib
import sys
from collections.abc import Callable, Iterator

from fenka.cli.interrupting import leave_at_once, raise_it
from fenka.core.errors import INTERRUPTED, FenkaError

INVALID_INPUT, TEMPORARY_FAILURE, PROGRAM_NOT_FOUND = 2, 75, 127


class UserError(FenkaError):
    """A sentence for the user, with the exit code that goes with it."""

    def __init__(self, sentence: str, code: int = 1) -> None:
        super().__init__(sentence)
        self.code = code


def print_error(sentence: str) -> None:
    """One line on stderr."""
    from fenka.cli.tables import shown

    sys.stderr.write(f"fenka: {shown(sentence)}\n")
    sys.stderr.flush()


@contextlib.contextmanager
def report_errors(show: Callable[[str], None] = print_error) -> Iterator[None]:
    """Show foreseen exceptions as one line and exit; let bugs through with a traceback."""
    try:
        raise_it()
        yield
    except KeyboardInterrupt:
        leave_at_once()
        sys.exit(INTERRUPTED)
    except BrokenPipeError:
        # The reader of our output went away (`| head`); it knows why.
        sys.stderr.close()
        sys.exit(1)
    except Exception as why:
        code = _code(why)
        if code is not None:
            show(str(why))
            sys.exit(code)
        if not isinstance(why, OSError):
            raise
        # The last net: files and disks fail in more ways than anybody has foreseen.
        from fenka.isolation.files import sentence

        show(sentence(why))
        sys.exit(1)


def _code(why: Exception) -> int | None:
    # Imported here: commands that succeed need none of it.
    from fenka.core.request import InvalidRequest
    from fenka.dialects.sizes import InvalidSize
    from fenka.hardware.card_lock import CardLocked
    from fenka.hardware.nvml import NoDriver
    from fenka.hardware.simulated import BadSpec, NodeError
    from fenka.isolation.sandbox import CannotIsolate
    from fenka.jobs.notebook import NoJupyter
    from fenka.kubernetes.client import ApiUnreachable
    from fenka.workstation.client import NoDaemon
    from fenka.workstation.daemon import AlreadyRunning
    from fenka.workstation.files import Unreadable
    from fenka.workstation.launch import NestedLease, NotGranted
    from fenka.workstation.main import BadOption
    from fenka.workstation.paths import UnsafeDirectory
    from fenka.workstation.protocol import OtherVersion

    if isinstance(why, UserError):
        return why.code
    if isinstance(why, NotGranted):
        return INVALID_INPUT if why.final else TEMPORARY_FAILURE
    if isinstance(why, InvalidRequest | InvalidSize | BadSpec | BadOption | NestedLease):
        return INVALID_INPUT
    foreseen = (
        ApiUnreachable,
        NoDriver,
        NodeError,
        CannotIsolate,
        NoJupyter,
        NoDaemon,
        AlreadyRunning,
        Unreadable,
        CardLocked,
        UnsafeDirectory,
        OtherVersion,
    )
    return 1 if isinstance(why, foreseen) else None
