"""`fenka …`, also as `python -m fenka`."""

import atexit
import os
import sys

from fenka.cli.startup import leave_at_once


def main() -> None:
    """Run a command. Ctrl-C is handled before anything else is imported."""
    leave_at_once()
    from fenka.cli.main import main as run

    try:
        run()
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            _end(end.code or 0)
        raise


def _end(code: int) -> None:
    """End this process without freeing each of its objects, which takes up to 0.1 s.

    Return if the output cannot be written: Python reports that.
    """
    threading = sys.modules.get("threading")
    if threading is not None and threading.active_count() > 1:
        return
    atexit._run_exitfuncs()
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except (AttributeError, OSError, ValueError):
        return
    os._exit(code)


if __name__ == "__main__":
    main()
