"""A clock for tests."""


class Clock:
    """Time that passes when a test says so."""

    def __init__(self, now: float = 1000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        """Return the seconds."""
        return self.now
