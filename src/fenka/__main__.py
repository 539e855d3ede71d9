"""`fenka …`, also as `python -m fenka`."""

from fenka.cli.interrupt import leave_at_once


def main() -> None:
    """Run a command. Ctrl-C is handled before anything else is imported."""
    leave_at_once()
    from fenka.cli.main import main as run

    run()


if __name__ == "__main__":
    main()
