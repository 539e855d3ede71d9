"""TensorBoard beside a training: it runs as long as the training, on a free port of the loopback address."""

import contextlib
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

from fenka.core.request import InvalidRequest
from fenka.jobs.ports import LOOPBACK
from fenka.workstation import paths, records

PROGRAM = "tensorboard"
PORTS = range(6006, 65536)
END_TIMEOUT_S = 5.0


def check() -> None:
    """Raise InvalidRequest if TensorBoard is not installed."""
    if shutil.which(PROGRAM) is None:
        raise InvalidRequest(
            f"--tensorboard requires the program {PROGRAM}, which is not installed here: run "
            f"`pip install {PROGRAM}`, or leave the option out"
        )


@contextlib.contextmanager
def running(directory: Path, logdir: str, working_directory: str) -> Iterator[str]:
    """Run TensorBoard, and yield its URL. Raises NoFreePort, OSError."""
    port, lock = paths.port_reservations().reserve(PORTS, reuse=True)
    log = records.log_of(directory, PROGRAM)
    log.parent.mkdir(mode=0o700, exist_ok=True)
    with (
        lock,
        log.open("ab") as output,
        subprocess.Popen(
            [PROGRAM, f"--logdir={logdir}", f"--host={LOOPBACK}", f"--port={port}"],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            cwd=working_directory,
        ) as program,
    ):
        try:
            yield f"http://{LOOPBACK}:{port}"
        finally:
            program.terminate()
            try:
                program.wait(END_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                program.kill()
