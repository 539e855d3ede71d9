"""The page of newcomers' times, made of docs/measurements/newcomer.toml."""

import tomllib

from tools.newcomer import DATA, NEWCOMERS
from tools.reference.markdown import code, page, table


def newcomer_page() -> str:
    """Return the page."""
    known = tomllib.loads(DATA.read_text()) if DATA.exists() else {}
    parts = []
    for name, person in NEWCOMERS.items():
        parts.append(f"## {person.title}")
        followed = f"Page: [{person.page}](../{person.page})."
        if name not in known:
            parts.append(f"{followed} Not timed yet.")
            continue
        run = known[name]
        total = sum(step["seconds"] for step in run["steps"])
        parts.append(
            f"{followed} All commands: **{total / 60:.1f} minutes**. "
            f"{run['machine']}, load average {run['load']}, {run['date']}."
        )
        rows = [(code(_short(step["command"])), f"{step['seconds']:,.1f}") for step in run["steps"]]
        parts.append(table(("command", "s"), rows))
    first = (
        "The time that a newcomer's commands take, from a machine or cluster without fenka. "
        "Reading and downloads of drivers are not counted. `python -m tools.newcomer` repeats it."
    )
    return page("A newcomer's ten minutes", first, "docs/measurements/newcomer.toml", *parts)


def _short(command: str) -> str:
    first = command.strip().splitlines()[0].rstrip("\\ ").replace("`", "'")
    return first if len(first) <= 90 else f"{first[:89]}…"
