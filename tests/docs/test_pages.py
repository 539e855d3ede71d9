"""The documentation's commands for one machine do what its pages show.

`tools/docs/blocks.py` says how pages mark what is run. Commands for a cluster run in
e2e/scenarios/test_guide.py.
"""

import os
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tools.docs.blocks import (
    Page,
    faults,
    read_page,
    readable_pages,
    run_page,
    unreadable_pages,
)
from tools.docs.shell import Shell

ROOT = Path(__file__).parents[2]
COMMANDS = Path(sys.executable).parent
AS_USER = """
mount --bind /run /run && mount -o remount,bind,ro /run &&
mount --bind /etc /etc && mount -o remount,bind,ro /etc &&
exec unshare --user --map-user=1000 --map-group=1000 "$@"
"""
"""Start a command as an ordinary user, where the tests run as root."""

END = """
names=$(fenka ps -o json |
  python3 -c 'import json, sys; print(*(job["name"] for job in json.load(sys.stdin)))')
[ -z "$names" ] || fenka stop --grace 0 $names
fenka daemon --stop || true
"""
"""End what a page that has failed leaves: programs run on when their daemon ends."""

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
MARKED = [
    page for page in PAGES if page.parent.name in {"start", "do", "fix"} or page.name == "README.md"
]
"""Pages all of whose blocks are run, or say why not."""


def name(page: Path) -> str:
    """Return a page's name for pytest."""
    return str(page.relative_to(ROOT))


@pytest.mark.parametrize("path", MARKED, ids=name)
def test_each_block_can_be_run_or_says_why_not(path: Path) -> None:
    """A new block without a mark would never be tried."""
    assert list(faults(read_page(path))) == []


def test_marks_of_all_pages_can_be_understood() -> None:
    """One mistyped mark must not keep the other pages from being tried."""
    assert list(unreadable_pages(PAGES)) == []


@pytest.fixture
def home() -> Iterator[Path]:
    """Provide an empty home directory of the reader."""
    directory = Path(tempfile.mkdtemp(prefix="fenka-docs-"))
    yield directory
    shutil.rmtree(directory, ignore_errors=True)


class ReaderShell(Shell):
    """A shell whose user is called `ada` in the pages."""

    def shown(self, text: str) -> str:
        """Return a text with this user's name."""
        return re.sub(r"\bada\b", self.run("id -un 2>/dev/null || id -u")[1].strip(), text)


def workstation(home: Path, page: Page) -> Shell:
    """Return the shell of an ordinary user in whose session a daemon has simulated cards."""
    environment = {
        "COLUMNS": "120",
        "FENKA_RUNTIME": str(home / ".run"),
        "HOME": str(home),
        "LANG": "C.UTF-8",
        "PATH": f"{COMMANDS}:/usr/local/bin:/usr/bin:/bin",
        "PYTHONDONTWRITEBYTECODE": "1",
        "TERM": "dumb",
    }
    prefix = ["unshare", "--mount", "sh", "-c", AS_USER, "sh"] if os.geteuid() == 0 else []
    shell = ReaderShell(home, environment, prefix)
    if page.option("workstation", "daemon") != "no":
        cards = page.option("workstation", "cards", "T4")
        code, printed = shell.run(f"fenka daemon --background --simulate '{cards}'")
        assert code == 0, printed
    return shell


def runnable() -> Iterator[object]:
    """Yield the pages with commands for a workstation."""
    for page in readable_pages(PAGES):
        if page.runs("workstation"):
            full_page = page.has("workstation", "full")
            left_out = full_page and os.environ.get("FENKA_E2E_TIER") != "full"
            skip = pytest.mark.skipif(left_out, reason="slow: set FENKA_E2E_TIER=full to run it")
            # A busy machine takes minutes for a page that starts many programs.
            marks = [pytest.mark.process, pytest.mark.timeout(600), skip]
            yield pytest.param(page, id=name(page.path), marks=marks)


@pytest.mark.parametrize("page", [*runnable()])
def test_commands_for_a_workstation_do_what_the_page_shows(page: Page, home: Path) -> None:
    """They run as an ordinary user, with simulated cards and a daemon of their own."""
    shell = workstation(home, page)
    try:
        run_page(page, "workstation", shell)
    finally:
        shell.run(END)
        shell.close()
