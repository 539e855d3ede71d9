"""The process of the node program, which has imported nothing of the command line's libraries.

`fenka node` replaces itself by it: option parsing would keep 10 MB on every node. Allocation is configured
for little memory, because the program's threads mostly wait.
"""

import os
import sys
from pathlib import Path
from typing import NoReturn, TypeVar

import msgspec

from fenka.cli.error_report import report_errors
from fenka.node.config import NodeConfig
from fenka.server.program import start_log

_Config = TypeVar("_Config")
_MALLOC = {"MALLOC_ARENA_MAX": "1", "MALLOC_TRIM_THRESHOLD_": "131072"}


def start(module: str, config: msgspec.Struct) -> NoReturn:
    """Replace this process by a program of this folder. module: its file, whose `main` reads the options."""
    options = msgspec.json.encode(config, enc_hook=os.path.abspath).decode()
    words = [sys.executable, "-Pm", f"fenka.cli.admin.{module}", options]
    os.chdir("/")
    os.execve(sys.executable, words, {**_MALLOC, **os.environ})


def options(kind: type[_Config]) -> _Config:
    """Return the options of the first argument."""
    return msgspec.json.decode(sys.argv[1], type=kind, dec_hook=lambda _, path: Path(path))


def main() -> None:
    """Run the node program with the options of the first argument."""
    from fenka.node.main import run

    config = options(NodeConfig)
    start_log(config.log_level, times=False)
    with report_errors():
        run(config)


if __name__ == "__main__":
    main()
