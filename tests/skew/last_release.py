"""Builds the last release from the history of this repository."""

import fcntl
import os
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[2]
COMMIT = "05b2347d935f9e3a8426ceb5455b96173712df09"
"""The state that counts as the last release, 0.1.0."""


def last_release_tree() -> Path:
    """Return a checkout of the last release, after `make build`. Raises LookupError without its history."""
    known = subprocess.run(
        ["git", "cat-file", "-e", f"{COMMIT}^{{commit}}"],
        cwd=ROOT,
        capture_output=True,
        check=False,
    )
    if known.returncode:
        raise LookupError(
            f"this clone has no commit {COMMIT}, the last release: run `git fetch --unshallow`"
        )
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fenka-tests"
    place = cache / f"release-{COMMIT}"
    cache.mkdir(parents=True, exist_ok=True)
    with (cache / f"release-{COMMIT}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (place / "built").exists():
            _build(place)
    return place


def _build(place: Path) -> None:
    place.mkdir(exist_ok=True)
    archive = subprocess.run(
        ["git", "archive", COMMIT], cwd=ROOT, capture_output=True, check=True
    ).stdout
    subprocess.run(["tar", "-x", "-C", place], input=archive, check=True)
    # The settings of the make that runs these tests are not for that tree.
    environment = {name: text for name, text in os.environ.items() if not name.startswith("MAKE")}
    subprocess.run(["make", "build"], cwd=place, env=environment, check=True)
    (place / "built").touch()
