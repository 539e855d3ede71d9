"""The page of events, made of events.toml and held to the reasons in the source."""

import ast
import re
import tomllib
from pathlib import Path

from tools.reference.markdown import ROOT, code, compare, page, parsed, sentence, table

TABLE = Path(__file__).with_name("events.toml")


def events_page() -> str:
    """Return the page. Raises MissingEntry if a reason has no entry, or an entry no reason."""
    entries = tomllib.loads(TABLE.read_text())
    compare(reasons(), entries, TABLE)
    rows = [
        (
            code(reason),
            entry["on"],
            entry["by"],
            sentence(entry["text"])
            + (f" [Fix](../fix/{entry['help']}.md)" if entry["help"] else ""),
        )
        for reason, entry in sorted(entries.items())
    ]
    first = (
        "The reasons of events that fenka writes. `kubectl describe` shows them. "
        "Repeated events are counted, not written again."
    )
    head = ("reason", "on", "written by", "meaning")
    return page("Events", first, str(TABLE.relative_to(ROOT)), table(head, rows))


def reasons() -> set[str]:
    """Return the reasons that stand in the source."""
    return {
        node.value
        for nodes in parsed().values()
        for node in nodes
        if isinstance(node, ast.Constant)
        and isinstance(node.value, str)
        and re.fullmatch(r"Fenka[A-Z]\w+", node.value)
    }
