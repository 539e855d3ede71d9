"""Record what was tried on what, and write the page "where it runs" and README's table from the records.

    python tools/where_it_runs.py [--check]
    python tools/where_it_runs.py run --part Python=3.13.5 --tests 'the demo' -- COMMAND...

Without a command it writes both; with --check it says whether they are as the records have them. `run` runs a
command and records how it ended. The end-to-end tests record themselves with FENKA_E2E_RECORD=1.
"""

import argparse
import datetime
import re
import subprocess
import sys
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parent.parent
RECORDS = ROOT / "docs" / "reference" / "tried.yaml"
CLAIMS = ROOT / "docs" / "reference" / "where-it-runs.yaml"
PAGE = ROOT / "docs" / "reference" / "where-it-runs.md"
README = ROOT / "README.md"
BEGIN, END = "<!-- where it runs: tools/where_it_runs.py -->", "<!-- end of where it runs -->"
WIDTH = 120
HEAD = ["| | tested here | should work | does not |", "|---|---|---|---|"]


@dataclass(frozen=True)
class Tried:
    """A run of tests.

    Attributes:
        parts: The version of each part of the system that it ran on.
        tests: The tests, for readers.
        passed: How many passed.
        failed: The names of the others.
        skipped: The reasons for which some did not run on these versions.
        date: The day of the run.
    """

    parts: Mapping[str, str]
    tests: str
    passed: int
    failed: Sequence[str] = ()
    skipped: Sequence[str] = ()
    date: str = field(default_factory=lambda: datetime.date.today().isoformat())

    @property
    def key(self) -> tuple[object, ...]:
        """The same tests on the same parts: a later run takes the place of an earlier one."""
        return (*sorted(self.parts.items()), self.tests)


def tried(records: Path | None = None) -> list[Tried]:
    """Return all records."""
    return [Tried(**entry) for entry in yaml.safe_load((records or RECORDS).read_text()) or ()]


def record(run: Tried, records: Path | None = None) -> None:
    """Add a run to the records."""
    others = [entry for entry in tried(records) if entry.key != run.key]
    documents = [
        {name: _plain(value) for name, value in asdict(entry).items() if value not in ((), [])}
        for entry in [*others, run]
    ]
    text = yaml.safe_dump(documents, sort_keys=False, allow_unicode=True, width=120)
    (records or RECORDS).write_text(text)


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def by_version(text: str) -> list[tuple[int, str]]:
    """Return a key that sorts 1.9 before 1.10."""
    return [
        (int(number) if number else -1, word) for number, word in re.findall(r"(\d+)|(\D+)", text)
    ]


def table(claims: Iterable[Mapping[str, str]], runs: Sequence[Tried]) -> list[str]:
    """Return the lines of the table: a row for each part of a system."""
    lines = list(HEAD)
    for claim in claims:
        part = claim["part"]
        of_part = [run for run in runs if part in run.parts]
        # A failure is held against the first part alone: it is the one that was tried.
        failed = [run for run in of_part if run.failed and next(iter(run.parts)) == part]
        versions = {run.parts[part] for run in of_part if run.passed and run not in failed}
        tested = ", ".join(sorted(versions, key=by_version)) or "nothing"
        broken = [
            f"{run.parts[part]} ({name} fails)"
            for run in failed
            for name in run.failed
            if run.parts[part] not in versions
        ]
        refused = "; ".join([*broken, *([claim["not"]] if "not" in claim else [])])
        lines.append(f"| {part} | {tested} | {claim.get('should', '')} | {refused} |")
    return lines


def page(claims: Mapping[str, Any], runs: Sequence[Tried]) -> str:
    """Return the page."""
    lines = [claims["title"], "", textwrap.fill(claims["answer"], WIDTH), ""]
    lines += [*table(claims["parts"], runs), "", textwrap.fill(claims["meaning"], WIDTH), ""]
    lines += ["## Versions of Kubernetes", "", textwrap.fill(claims["kubernetes"], WIDTH), ""]
    lines += ["| Kubernetes | tests passed | left out, and why |", "|---|---|---|"]
    kubernetes = [run for run in runs if "Kubernetes" in run.parts and run.tests == claims["core"]]
    for run in sorted(kubernetes, key=lambda run: by_version(run.parts["Kubernetes"])):
        runtime = next((name for name in ("containerd", "CRI-O") if name in run.parts), "")
        name = f"{run.parts['Kubernetes']}, {runtime} {run.parts.get(runtime, '')}"
        lines.append(f"| {name} | {run.passed} | {'; '.join(run.skipped) or 'nothing'} |")
    lines.append("")
    for section in claims["sections"]:
        lines += [f"## {section['title']}", "", section["text"].strip(), ""]
    lines += ["## Runs", "", "Each row is a run of these tests on these versions.", ""]
    lines += ["| date | on | tests | passed | failed |", "|---|---|---|---|---|"]
    for run in runs:
        parts = ", ".join(f"{name} {version}" for name, version in run.parts.items())
        failed = ", ".join(run.failed) or "none"
        lines.append(f"| {run.date} | {parts} | {run.tests} | {run.passed} | {failed} |")
    return "\n".join([*lines, ""])


def readme(text: str, claims: Mapping[str, Any], runs: Sequence[Tried]) -> str:
    """Return README with its table, between the markers; without markers it stays as it is."""
    rows = "\n".join(table(claims["parts"], runs))
    pattern = re.compile(f"{re.escape(BEGIN)}\n.*?{re.escape(END)}", re.DOTALL)
    return pattern.sub(lambda _: f"{BEGIN}\n{rows}\n{END}", text)


def rendered() -> dict[Path, str]:
    """Return the text of the files that are written from the records."""
    claims, runs = yaml.safe_load(CLAIMS.read_text()), tried()
    return {PAGE: page(claims, runs), README: readme(README.read_text(), claims, runs)}


def outdated() -> list[Path]:
    """Return the files that are not as the records have them."""
    return [
        path for path, text in rendered().items() if not path.exists() or path.read_text() != text
    ]


def run_recorded(parts: Sequence[str], tests: str, command: Sequence[str]) -> int:
    """Run a command, record whether it succeeded, and return its exit code."""
    code = subprocess.run(command, check=False).returncode
    versions = dict(part.split("=", 1) for part in parts)
    record(Tried(versions, tests, passed=int(code == 0), failed=(tests,) if code else ()))
    return code


def main() -> int:
    """Write, check or record."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="only say what is outdated")
    run = parser.add_subparsers(dest="action").add_parser("run", help="run and record a command")
    run.add_argument("--part", action="append", metavar="NAME=VERSION", required=True)
    run.add_argument("--tests", required=True, help="the tests, in words")
    run.add_argument("command", nargs="+")
    arguments = parser.parse_args()
    if arguments.action == "run":
        code = run_recorded(arguments.part, arguments.tests, arguments.command)
        if code:
            return code
    elif arguments.check:
        paths = outdated()
        for path in paths:
            print(f"{path.relative_to(ROOT)} is outdated: run `python tools/where_it_runs.py`")
        return int(bool(paths))
    for path, text in rendered().items():
        path.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
