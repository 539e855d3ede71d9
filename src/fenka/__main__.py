"""`fenka …`, also as `python -m fenka`."""

from fenka.cli.interrupting import leave_at_once


def main() -> None:
    """Run a command; the imports of `fenka.cli.main` take longer than it takes to press Ctrl-C."""
    leave_at_once()
    from fenka.cli.main import main as run

    run()


if __name__ == "__main__":
    main()
