"""Ended jobs: what is kept of one, and the sentence about it.

The daemon keeps these records (`history.py`), and commands show them. Names, commands and figures come from
users, so they are bounded before they are kept.
"""

import signal
from typing import Literal

import msgspec

MAX_COMMAND_CHARACTERS = 256
"""As much of a command is kept after its end, for people to recognise it."""

EndCause = Literal[
    "exit", "stopped", "cancelled", "time-limit", "evicted", "shutdown", "unobserved"
]
"""exit: by itself, or by a signal that is not fenka's. cancelled: the process that requested it has ended.
shutdown: its daemon ended all jobs. unobserved: it ended while no daemon ran."""


class EndedJob(msgspec.Struct, frozen=True):
    """A job that has ended. Times are Unix seconds.

    Attributes:
        run: Its number among the runs of this name; 0 if it left no log.
        gang, rank, size: The gang's name, the member's number, and the number of members.
        started_at: None if its program was never started.
        status: Its program's wait status, as os.waitstatus_to_exitcode takes it; None if it is not known.
        stopped_by: The user who stopped it, if one did.
        lost_card: Index of a card of it that was unhealthy at its end, or lost; None without one.
        refused: How often memory beyond its slice was refused.
        peak_mib: The most memory that it held of each of its cards, by its own account.
    """

    id: str
    name: str
    user: str
    uid: int
    kind: str
    run: int
    command: list[str]
    summary: str
    requested_at: float
    started_at: float | None
    ended_at: float
    status: int | None = None
    cause: EndCause = "exit"
    stopped_by: str = ""
    lost_card: int | None = None
    refused: int = 0
    cards: list[int] = []
    peak_mib: list[int] = []
    gang: str = ""
    rank: int = 0
    size: int = 1

    @property
    def exit_code(self) -> int | None:
        """The program's exit code, 128 + the number of a signal that ended it; None if it is not known."""
        return None if self.status is None else exit_code(self.status)

    @property
    def waited_s(self) -> float:
        """Seconds that it waited for its slice."""
        return max((self.started_at or self.ended_at) - self.requested_at, 0)

    @property
    def ran_s(self) -> float | None:
        """Seconds that it held its slice; None if its program was never started."""
        return None if self.started_at is None else max(self.ended_at - self.started_at, 0)

    @property
    def sentence(self) -> str:
        """How it ended and why."""
        return "; ".join(filter(None, [self._outcome(), self._cause(), *self._circumstances()]))

    def _outcome(self) -> str:
        if self.started_at is None:
            return "never started"
        return "exit code unknown" if self.status is None else describe_status(self.status)

    def _cause(self) -> str:
        if self.cause == "stopped":
            return f"stopped by {self.stopped_by}"
        return {
            "exit": "",
            "cancelled": "the command that requested it ended",
            "time-limit": "its time limit was over",
            "evicted": "evicted for a request of higher priority",
            "shutdown": "its daemon ended all jobs",
            "unobserved": "it ended while no daemon ran",
        }[self.cause]

    def _circumstances(self) -> list[str]:
        lost = [] if self.lost_card is None else [f"card {self.lost_card} was lost or unhealthy"]
        if not self.refused:
            return lost
        times = "once" if self.refused == 1 else f"{self.refused} times"
        return [*lost, f"memory beyond its slice was refused {times}"]


def exit_code(status: int) -> int:
    """Return a wait status as shells do: 128 + the number of a signal."""
    code = -(status & 0x7F) if status & 0x7F else status >> 8 & 0xFF
    return code if code >= 0 else 128 - code


def describe_status(status: int) -> str:
    """Return a wait status in words: `exit code 1`, `SIGKILL`."""
    number = status & 0x7F
    if not number:
        return f"exit code {status >> 8 & 0xFF}"
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
