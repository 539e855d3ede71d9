"""Submit the training that backfills, and read the steps that it records."""

import json
from pathlib import Path
from typing import Any

from e2e.cluster import wait_until
from e2e.scenarios.jobs import CODE, Jobs

MEMBER = 10
"""Units of a member, of a card's 14: two members are on two cards."""


def backfill(jobs: Jobs, folder: str) -> None:
    """Start the training `gang`, whose claim `steps` has this folder, and wait for its first steps."""
    options = ["--backfill", "--workers=2", f"--gpu-mem={MEMBER}", "--checkpoint=steps", CODE]
    jobs.submit("pytorchjob", "gang", *options, command=["python3", "code/backfilling.py"])
    wait_until("steps of both members", lambda: attempts(folder) == [0, 0], 180)


def steps(folder: str, rank: int) -> list[dict[str, Any]]:
    """Return the steps that a member has recorded."""
    file = Path(folder, f"steps-{rank}")
    lines = file.read_text().splitlines(keepends=True) if file.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def attempts(folder: str) -> list[int]:
    """Return the latest attempt of each member, -1 before its first step."""
    return [(steps(folder, rank) or [{"attempt": -1}])[-1]["attempt"] for rank in (0, 1)]
