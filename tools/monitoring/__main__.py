"""Writes the chart's boards for Grafana.

    python -m tools.monitoring [--check]

With --check nothing is written; the exit code is 1 if a board is not current.
"""

import json
import sys
from pathlib import Path

from grafana_foundation_sdk.builders.dashboard import Dashboard
from grafana_foundation_sdk.cog.encoder import JSONEncoder

from tools.monitoring.boards import BOARDS

FOLDER = Path(__file__).parent.parent.parent / "deploy" / "chart" / "files"


def boards() -> dict[Path, str]:
    """Return the content of each file."""
    return {FOLDER / f"{name}.json": f"{_encode(make())}\n" for name, make in BOARDS.items()}


def _encode(board: Dashboard) -> str:
    content = json.loads(JSONEncoder().encode(board.build()))
    for annotation in content["annotations"]["list"]:
        # Grafana reads these of a query to Prometheus; the library does not know them.
        annotation |= {
            "titleFormat": "XID: {{kind}}",
            "textFormat": "{{node}} card {{index}}, {{model}}",
        }
    return json.dumps(content, sort_keys=True, indent=2)


def main(arguments: list[str]) -> int:
    """Write the boards, or compare them."""
    stale = []
    for file, content in boards().items():
        if not file.exists() or file.read_text() != content:
            stale.append(file.name)
            if "--check" not in arguments:
                file.write_text(content)
    if stale and "--check" in arguments:
        print(
            f"not current: {', '.join(stale)}; `python -m tools.monitoring` writes them",
            file=sys.stderr,
        )
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
