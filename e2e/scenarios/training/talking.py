"""A training that prints a line for each step until the file /tmp/go exists, and then fails with code 3."""

import itertools
import os
import sys
import time
from pathlib import Path

who = f"rank={os.environ['RANK']} attempt={os.environ['FENKA_RESTARTS']}"
for step in itertools.count():
    sys.stdout.write(f"{who} step={step}\n")
    if Path("/tmp/go").exists():
        sys.exit(3)
    time.sleep(0.2)
