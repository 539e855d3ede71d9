"""Waits for workloads, and prints what they wait for when that changes."""

import sys
import time
from collections.abc import Callable, Iterator

from fenka.cli.error_report import UserError
from fenka.cli.tables import escape
from fenka.cli.workloads.selection import Backend, find_version
from fenka.core.errors import TEMPORARY_FAILURE
from fenka.views.workloads import ServiceVersion

POLL_S = 1.0


def polls(timeout_s: float | None, interval_s: float, late: Callable[[], str]) -> Iterator[None]:
    """Yield now and after each interval. When the time is over, raise UserError with the sentence of `late`.

    timeout_s: None to wait indefinitely.
    """
    began = time.monotonic()
    while True:
        yield
        if timeout_s is not None and time.monotonic() - began >= timeout_s:
            raise UserError(late(), TEMPORARY_FAILURE)
        time.sleep(interval_s)


class ProgressLine:
    """The state of a workload that is waited for, printed on stderr when it changes."""

    def __init__(self, name: str) -> None:
        self._name, self.text = name, ""

    def show(self, text: str) -> None:
        """Print it, unless it was printed last."""
        if text != self.text:
            print(f"{self._name}: {escape(text)}", file=sys.stderr, flush=True)
            self.text = text


def wait_until_available(
    backend: Backend, name: str, version: str, timeout_s: float | None, least: int = 0
) -> None:
    """Wait until all replicas of a version accept requests; print why they do not. Raises UserError.

    least: With 0 there may be no replica before its first request.
    """
    progress = ProgressLine(name)

    def late() -> str:
        return (
            f"{name} is not available after {timeout_s:g} s ({progress.text}): it stays, see fenka serve get "
            f"{name} -v {version}"
        )

    for _ in polls(timeout_s, POLL_S, late):
        shown = find_version(backend, name, version)
        text = f"{shown.available} of {shown.desired} replicas accept requests"
        if shown.rolled_out and (shown.desired or not least):
            break
        if shown.available >= shown.desired:
            text = "its replicas are being replaced"
        waiting = shown.note or shown.why or _starting(shown)
        progress.show(f"{text}: {waiting}" if waiting else text)
    ports = ",".join(map(str, shown.ports))
    print(escape(f"{name}: {text} at {shown.address} ({ports})"))


def _starting(version: ServiceVersion) -> str:
    """Return the states of the replicas that do not accept requests."""
    return ", ".join(
        f"{replica.name} is {replica.status}"
        for replica in version.instances
        if replica.ready < replica.containers
    )
