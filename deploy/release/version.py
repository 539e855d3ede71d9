"""The version has one place, `src/fenka/__init__.py`; the places that repeat it are listed here.

`python -m deploy.release.version` prints the version. With a version as argument it writes that everywhere.
"""

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

SOURCE: Final = Path("src", "fenka", "__init__.py")

_VERSION = r"(\d+\.\d+\.\d+)"
_SOURCE_LINE = re.compile(rf'^__version__ = "{_VERSION}"$', re.MULTILINE)
REPEATED: Final = (
    ("deploy/chart/Chart.yaml", re.compile(rf"^(?:version|appVersion): {_VERSION}$", re.MULTILINE)),
    *(
        (pattern, re.compile(rf"\bfenka[:_-]{_VERSION}(?![.\d]*\d)"))
        for pattern in ("README.md", "docs/**/*.md", "e2e/scenarios/test_guide.py")
    ),
)
"""Files, and what repeats the version there: the chart's, and names of images, packages and archives."""


def current_version(root: Path) -> str:
    """Return the version of a checkout. Raises ValueError where the line is missing."""
    (version,) = _SOURCE_LINE.findall((root / SOURCE).read_text())
    return str(version)


def repetitions(root: Path) -> Iterator[tuple[Path, str]]:
    """Yield each file that repeats the version, with the version that it has."""
    for pattern, repeated in REPEATED:
        for path in sorted(root.glob(pattern)):
            for version in repeated.findall(path.read_text()):
                yield path, version


def write_version(root: Path, version: str) -> None:
    """Write a version into its place, and into all that repeat it. Raises ValueError for no version."""
    if not re.fullmatch(_VERSION, version):
        raise ValueError(f"{version} is no version of three numbers, such as 0.2.0")
    places = [(str(SOURCE), _SOURCE_LINE), *REPEATED]
    for pattern, repeated in places:
        for path in sorted(root.glob(pattern)):
            text = path.read_text()
            # Only the number inside of what was found is replaced.
            path.write_text(
                repeated.sub(lambda found: found[0].replace(found[1], version, 1), text)
            )


def main() -> int:
    """Print the version, or write the one that is given."""
    root = Path(__file__).parents[2]
    if len(sys.argv) > 2:
        print("usage: python -m deploy.release.version [VERSION]", file=sys.stderr)
        return 2
    if len(sys.argv) == 1:
        print(current_version(root))
        return 0
    try:
        write_version(root, sys.argv[1])
    except ValueError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
