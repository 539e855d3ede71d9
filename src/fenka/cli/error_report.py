"""Reporting of errors: one sentence and an exit code for every expected failure."""

import contextlib
import sys
from collections.abc import Callable, Iterator

from fenka.cli.startup import leave_at_once, raise_it
from fenka.core.errors import FAILURE, INTERRUPTED, FenkaError

EXTRAS = {"cryptography": "cluster", "grpc": "cluster", "google": "cluster", "matplotlib": "plots"}
"""Packages that some commands need, and the extras of fenka that install them."""


class UserError(FenkaError):
    """A failure of a command itself, with its exit code."""

    def __init__(self, sentence: str, exit_code: int = FAILURE) -> None:
        super().__init__(sentence)
        self.exit_code = exit_code


def print_error(sentence: str) -> None:
    """Print one line on stderr."""
    from fenka.cli.tables import escape

    sys.stderr.write(f"fenka: {escape(sentence)}\n")
    sys.stderr.flush()


def print_progress(sentence: str) -> None:
    """Print one line on stderr if that is a terminal."""
    if sys.stderr.isatty():
        print_error(sentence)


@contextlib.contextmanager
def report_errors(show: Callable[[str], None] = print_error) -> Iterator[None]:
    """Show expected exceptions as one line and exit; let bugs through with a traceback."""
    try:
        raise_it()
        yield
    except KeyboardInterrupt:
        leave_at_once()
        sys.exit(INTERRUPTED)
    except BrokenPipeError:
        # The reader of the output has closed it (`| head`), so no message is needed.
        sys.stderr.close()
        sys.exit(FAILURE)
    except FenkaError as why:
        show(str(why))
        sys.exit(why.exit_code)
    except ModuleNotFoundError as why:
        package = (why.name or "").partition(".")[0]
        if package not in EXTRAS:
            raise
        from fenka.installation import how_to_add_extra

        show(f"{package} is not installed: {how_to_add_extra(EXTRAS[package])}")
        sys.exit(FAILURE)
    except OSError as why:
        # Files and disks fail in more ways than each command can handle by itself.
        from fenka.isolation.lease_files import describe_os_error

        show(describe_os_error(_with_place(why)))
        sys.exit(FAILURE)


def _with_place(why: OSError) -> OSError:
    """Return an error of a full disk with the place that is full, since failed writes name no file."""
    import os
    from pathlib import Path

    from fenka.jobs.disk_room import NO_ROOM, with_directory
    from fenka.workstation import paths

    if why.errno not in NO_ROOM:
        return why
    places = [*paths.written_directories(), Path(os.environ.get("TMPDIR", "/tmp")), Path.cwd()]
    with contextlib.suppress(OSError):
        # The output may be redirected to a file.
        places.append(Path("/proc/self/fd/1").readlink().parent)
    return with_directory(why, places)
