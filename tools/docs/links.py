"""Checks the links of the repository's Markdown files: files and headings must exist.

python tools/docs/links.py          # prints the dead ones; exit code 1 if there are any
"""

import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]

_LINK = re.compile(
    r"(?<!\\)\[(?:[^\[\]]|\[[^\[\]]*\])*\]\(([^()\s]+(?:\([^()\s]*\)[^()\s]*)?)(?:\s+\"[^\"]*\")?\)"
)
_CODE = re.compile(r"^ *(```+|~~~+).*?^ *\1 *$|`[^`\n]+`", re.MULTILINE | re.DOTALL)
_ANCHOR = re.compile(r"<a (?:id|name)=\"([^\"]+)\"")
_HEADING = re.compile(r"^#{1,6} +(.+?)(?: +#+)?$", re.MULTILINE)


def links(text: str) -> Iterator[str]:
    """Yield the targets of a text's links, except those in code."""
    for match in _LINK.finditer(_CODE.sub("", text)):
        yield match[1]


@cache
def anchors(path: Path) -> frozenset[str]:
    """Return the names by which links reach a page's headings, as forges and the site make them."""
    text = path.read_text()
    without_fences = re.sub(r"^ *(```+|~~~+).*?^ *\1 *$", "", text, flags=re.MULTILINE | re.DOTALL)
    found, counts = set(_ANCHOR.findall(text)), dict[str, int]()
    for heading in _HEADING.findall(without_fences):
        name = slug(heading)
        count = counts[name] = counts.get(name, -1) + 1
        found.add(f"{name}-{count}" if count else name)
    return frozenset(found)


def slug(heading: str) -> str:
    """Return a heading's anchor."""
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading.replace("`", ""))
    return re.sub(r"[^\w\- ]", "", text.strip().lower()).replace(" ", "-")


def dead_links(path: Path) -> Iterator[str]:
    """Yield a sentence for each link of a page that leads nowhere in the repository."""
    for target in links(path.read_text()):
        if re.match(r"[a-z][a-z+.-]*:", target):
            continue
        name, _, anchor = target.partition("#")
        file = (path.parent / name) if name else path
        if not file.exists():
            yield f"{path.relative_to(ROOT)}: {target}: no such file"
        elif anchor and file.suffix == ".md" and anchor not in anchors(file.resolve()):
            yield f"{path.relative_to(ROOT)}: {target}: no such heading"


def pages() -> list[Path]:
    """Return the Markdown files of the repository."""
    names = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", "*.md"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    return [ROOT / name for name in names.split("\0") if name and (ROOT / name).exists()]


if __name__ == "__main__":
    dead = [sentence for page in pages() for sentence in dead_links(page)]
    print(*dead, sep="\n", end="\n" if dead else "")
    sys.exit(bool(dead))
