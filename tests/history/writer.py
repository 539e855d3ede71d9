"""Writes usage and readings as fast as it can, until it is killed. Prints each second that is written."""

import sys
from pathlib import Path

from fenka.history.history_store import HistoryStore
from tests.history.records import ANNA, charged, observed


def main() -> None:
    """Write to the file that the command line names, as the observer that it names."""
    file, observer = sys.argv[1:]
    store = HistoryStore(Path(file), 8 << 20)
    earlier = store.usage(0, 10**9) or []
    second = sum(record.amounts.card_us for record in earlier) // 10**6
    first = observed(second, ANNA, observer=observer)
    while True:
        before, after = (observed(at, ANNA, observer=observer) for at in (second, second + 5))
        figures = {"j1": (second, 4308, None, 0, 0)}
        batch = charged(before, after, figures=figures)._replace(first=first)
        assert store.write(batch), store.problem
        second += 5
        print(second, flush=True)


main()
