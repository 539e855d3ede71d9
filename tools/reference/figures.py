"""The page of all measured figures, made of docs/measurements/figures.toml."""

import re
import tomllib
from typing import Any

from tools.reference.markdown import DOCS, ROOT, MissingEntry, page, table

DATA = DOCS / "measurements" / "figures.toml"


def figures_page() -> str:
    """Return the page. Raises MissingEntry if a bench of bench/ has no figures, or names no program."""
    data = tomllib.loads(DATA.read_text())
    programs = {folder.parent.name for folder in (ROOT / "bench").glob("*/run.py")}
    named = {
        name
        for bench in data["bench"]
        for name in re.findall(r"bench/(\w+)/run\.py", bench["repeat"])
    }
    if named - programs:
        raise MissingEntry(
            f"{DATA.name} repeats programs that do not exist: {sorted(named - programs)}"
        )
    if missing := programs - named - NOT_PUBLISHED:
        raise MissingEntry(
            f"{DATA.name} has no figures of bench/{', bench/'.join(sorted(missing))}"
        )
    parts = []
    for bench in data["bench"]:
        parts += [f"## {bench['id'].replace('-', ' ').capitalize()}", bench["title"], _table(bench)]
        parts.append(
            f"Baseline: {bench['baseline']}. Machine: {bench.get('machine', data['machine'])}, "
            f"{bench['date']}. Repeat with `{bench['repeat']}`."
        )
        if note := bench.get("note"):
            parts.append(note)
        if picture := bench.get("picture"):
            parts.append(f"![{bench['title']}]({picture})")
    first = (
        "Each figure with its baseline, which was measured in the same run. "
        "None is of a real card: [hardware](hardware.md) says what was seen on one. "
        "`make bench` repeats all."
    )
    return page("What was measured?", first, "docs/measurements/figures.toml", *parts)


NOT_PUBLISHED = {"scheduler"}
"""Benches of parts whose whole is measured by another one."""


def _table(bench: dict[str, Any]) -> str:
    rows = []
    for figure in bench["figures"]:
        value = figure["value"]
        number = f"{value:,}" if isinstance(value, int | float) else value
        goal = figure.get("goal", "")
        if goal:
            goal = f"{goal}: {'met' if figure['met'] else '**missed**'}"
        rows.append(
            (figure["what"], f"{number} {figure['unit']}".strip(), figure.get("baseline", ""), goal)
        )
    return table(("what", "fenka", "baseline", "goal"), rows)
