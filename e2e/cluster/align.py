"""Raise a program's dependencies to the cluster's versions: ``python3 align.py coredns jobset``.

Go then compiles the packages that they share once, which saves minutes of every first build. Run it again
if the raised modules require others.
"""

import json
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent


def go(folder: Path, *arguments: str) -> str:
    """Return the output of a go command in a folder."""
    command = ["go", *arguments]
    return subprocess.run(command, cwd=folder, check=True, stdout=subprocess.PIPE, text=True).stdout


def versions(folder: Path) -> dict[str, str]:
    """Return the versions of the modules that a go.mod requires, as replaced there."""
    module = json.loads(go(folder, "mod", "edit", "-json"))
    required = {each["Path"]: each["Version"] for each in module["Require"]}
    replaced = {each["Old"]["Path"]: each["New"]["Version"] for each in module.get("Replace") or ()}
    return {name: replaced.get(name, version) for name, version in required.items()}


def main() -> None:
    """Rewrite go.mod and go.sum of each named folder."""
    cluster = versions(HERE)
    for name in sys.argv[1:]:
        folder = HERE.parent / name
        own = versions(folder)
        shared = [
            f"{module}@{cluster[module]}"
            for module, version in own.items()
            if cluster.get(module, version) != version
        ]
        if shared:
            go(folder, "get", *shared)
        go(folder, "mod", "tidy")
        print(f"{name}: {len(shared)} modules changed")


if __name__ == "__main__":
    main()
