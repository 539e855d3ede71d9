"""Brings the code of a training on this machine: a directory, or a clone of a repository."""

import os
import shutil
import signal
import subprocess
from collections.abc import Mapping
from pathlib import Path

from fenka import procfs
from fenka.core.errors import FAILURE, FenkaError
from fenka.jobs import archive, repository
from fenka.jobs.training import TrainingSpec

LOG = "init-code"
"""The directory of git's output among the logs: on a cluster, the container of this name has it."""


class CodeNotFetched(FenkaError):
    """The code could not be brought."""

    exit_code = FAILURE


def bring(spec: TrainingSpec, credentials: Mapping[str, str], directory: Path, log: Path) -> None:
    """Clone or copy the code to `directory/code`. Raises CodeNotFetched, InvalidRequest, OSError."""
    if spec.sync_source:
        _clone(spec, credentials, directory / "code" / spec.project, log)
    elif spec.code:
        _copy(Path(spec.code), directory / "code")


def _clone(spec: TrainingSpec, credentials: Mapping[str, str], target: Path, log: Path) -> None:
    variables = repository.clone_variables(spec, str(target), "", credentials=bool(credentials))
    environment = {**os.environ, **credentials, **variables}
    log.parent.mkdir(mode=0o700, parents=True)
    with log.open("w+b") as output:
        try:
            done = subprocess.run(
                ["sh", "-c", repository.CLONE],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=environment,
                # Or its next command would write to a directory that may be deleted by then.
                preexec_fn=lambda: procfs.die_with_parent(signal.SIGKILL),
                check=False,
            )
        except FileNotFoundError as why:
            raise CodeNotFetched(f"{why.filename} is not installed here") from None
        output.seek(0)
        printed = output.read().decode(errors="replace")
    if done.returncode:
        reason = repository.failure_reason(printed) or f"it ended with {done.returncode}"
        raise CodeNotFetched(f"git cannot fetch {spec.sync_source}: {reason}")


def _copy(source: Path, target: Path) -> None:
    """Copy what git would not ignore: the same files as to a cluster, and of any size."""
    for name in map(os.fsdecode, archive.files(source)):
        if (source / name).is_dir():
            continue  # a submodule
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(source / name, target / name, follow_symlinks=False)
