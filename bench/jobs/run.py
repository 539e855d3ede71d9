"""Measure training jobs: screens of 500, submissions, and the time until a submitted program runs.

``python bench/jobs/run.py [--only screens submissions first-line]``. Exits 1 when a goal is missed.
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from bench.jobs import first_line, screens, submissions

PARTS = {
    "screens": screens.measure,
    "submissions": submissions.measure,
    "first-line": first_line.measure,
}


def main() -> int:
    """Measure and print; return 1 if a goal is missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", choices=[*PARTS], default=[*PARTS])
    met = []
    for part in parser.parse_args().only:
        met.append(PARTS[part]())
        print(flush=True)
    return 0 if all(met) else 1


if __name__ == "__main__":
    sys.exit(main())
