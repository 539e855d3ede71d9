"""Writes the generated pages of the documentation: `make reference`.

    python -m tools.reference [--check]

With --check nothing is written; the exit code is 1 if a page is not current.
"""

import sys

from tools.reference.commands import commands_page
from tools.reference.configuration import configuration_page, exit_codes_page
from tools.reference.events import events_page
from tools.reference.figures import figures_page
from tools.reference.markdown import DOCS, ROOT, MissingEntry
from tools.reference.messages import messages_page
from tools.reference.metrics import metrics_page
from tools.reference.names import names_page
from tools.reference.newcomer import newcomer_page
from tools.reference.page_messages import messages_module
from tools.reference.values import values_page

PAGES = {
    "reference/commands.md": commands_page,
    "reference/names.md": names_page,
    "reference/metrics.md": metrics_page,
    "reference/events.md": events_page,
    "reference/chart-values.md": values_page,
    "reference/configuration.md": configuration_page,
    "reference/exit-codes.md": exit_codes_page,
    "fix/messages.md": messages_page,
    "measurements/figures.md": figures_page,
    "measurements/newcomer.md": newcomer_page,
    "../web/src/messages.ts": messages_module,
}
"""The files by their place from docs/, and what makes them."""


def main(arguments: list[str]) -> int:
    """Write the pages, or compare them."""
    stale = []
    for name, make in PAGES.items():
        file = (DOCS / name).resolve()
        text = make()
        if file.exists() and file.read_text() == text:
            continue
        stale.append(str(file.relative_to(ROOT)))
        if "--check" not in arguments:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
    if stale and "--check" in arguments:
        print(f"not current: {', '.join(stale)}: run `make reference`, and commit the result")
    return int(bool(stale) and "--check" in arguments)


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except MissingEntry as error:
        sys.exit(f"reference: {error}")
