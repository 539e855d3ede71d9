"""Checks requests for leases, and turns them into jobs."""

import math
import os
import re
import secrets
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

import msgspec

from fenka.core.request import InvalidRequest, Request
from fenka.dialects.sizes import parse_memory
from fenka.hardware.peer_credentials import user_name
from fenka.isolation.layout import constant
from fenka.workstation import protocol
from fenka.workstation.job import Gang, Job

MAX_MEMBERS = 256
"""Of a gang: more than any machine has cards, and few enough to be placed without delay."""

MAX_PRIORITY = 1_000_000
"""Limit of a priority's absolute value."""

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
"""A job's name, which is part of paths and shown to other users."""

MAX_COMMAND_CHARACTERS = 2048
"""Of a command that are recorded, for people to recognise it."""

MAX_MODELS = 64
MAX_PATH_CHARACTERS = 4096
MAX_VALUE_CHARACTERS = 128
"""Of a size or a model's name."""


@dataclass(frozen=True, slots=True)
class Peer:
    """The process that submits a request, by what the kernel reports of it."""

    pid: int
    uid: int
    start_ticks: int


def validate(request: protocol.SubmitJob) -> None:
    """Check what does not depend on the daemon's state. Raises InvalidRequest.

    Called by clients before they send a request, and again by the daemon.
    """
    if request.name and not NAME.fullmatch(request.name):
        raise InvalidRequest(
            f"{request.name[:80]!r} is no name: use letters, digits, dots, dashes and underscores, 63 at most"
        )
    short = [request.gpu_mem, *request.models]
    if len(request.models) > MAX_MODELS or max(map(len, short)) > MAX_VALUE_CHARACTERS:
        raise InvalidRequest(
            f"a request has at most {MAX_MODELS} models, and sizes and models at most {MAX_VALUE_CHARACTERS} "
            "characters"
        )
    if request.gang is not None and not 1 <= request.gang <= MAX_MEMBERS:
        raise InvalidRequest(f"a gang has 1 to {MAX_MEMBERS} members, not {request.gang}")
    if request.time_limit_s is not None and not 0 < request.time_limit_s < math.inf:
        raise InvalidRequest(
            f"--time-limit must be a positive number of seconds, got {request.time_limit_s:g}"
        )
    if abs(request.priority) > MAX_PRIORITY:
        raise InvalidRequest(
            f"a priority is a number from -{MAX_PRIORITY} to {MAX_PRIORITY}, not {request.priority}"
        )
    max_cards = constant("FENKA_MAX_CARDS")
    if request.cards > max_cards:
        raise InvalidRequest(f"one lease has at most {max_cards} cards, not {request.cards}")


def truncate(request: protocol.SubmitJob) -> protocol.SubmitJob:
    """Return the request with its command and directory shortened to what is recorded, as valid text."""
    words, left = list[str](), MAX_COMMAND_CHARACTERS
    for word in map(_as_text, request.command):
        if left < len(word):
            words.append(word[: max(left, 0)] + "…")
            break
        words.append(word)
        left -= len(word) + 1
    return msgspec.structs.replace(
        request, command=words, directory=_as_text(request.directory)[:MAX_PATH_CHARACTERS]
    )


def generate_name(command: list[str]) -> str:
    """Return a name for a job whose user gives none."""
    program = re.sub(r"[^A-Za-z0-9._-]+", "-", Path(command[0]).name).lstrip("._-")[:56]
    return f"{program or 'job'}-{secrets.token_hex(2)}"


def _as_text(text: str) -> str:
    """Replace bytes that are not UTF-8, which names of files may contain."""
    return text.encode(errors="replace").decode()


def create_jobs(
    request: protocol.SubmitJob, peer: Peer, unit_mib: int, existing: Collection[Job], now: float
) -> list[Job]:
    """Return the job, or the members of the gang, that a request describes.

    Args:
        request: The client's request.
        peer: The client's process.
        unit_mib: The unit of sizes that name none.
        existing: All current jobs.
        now: Unix seconds.

    Raises:
        InvalidSize, InvalidRequest: The request is rejected.
    """
    validate(request)
    request = truncate(request)
    if request.priority > 0 and peer.uid not in (0, os.geteuid()):
        raise InvalidRequest(
            f"only {user_name(os.geteuid())}, who runs this daemon, may give a priority above 0: use 0 "
            f"or less, not {request.priority}"
        )
    first = _create_job(request, peer, unit_mib)
    if any(first.name in (job.display_name, job.name, job.id) for job in existing):
        raise InvalidRequest(f"a job called {first.name} is already here: choose another --name")
    # Later than all other requests, also if the clock was set back.
    first.requested_at = max([now, *(job.requested_at + 1e-3 for job in existing)])
    if request.gang is None:
        return [first]
    gang = Gang(first.id, first.name, request.gang, first.pid, first.start_ticks)
    return [
        msgspec.structs.replace(
            first, id=secrets.token_hex(4), name=f"{first.name}/{rank}", gang=gang, rank=rank
        )
        for rank in range(request.gang)
    ]


def _create_job(request: protocol.SubmitJob, peer: Peer, unit_mib: int) -> Job:
    memory = None if request.whole else parse_memory(request.gpu_mem, unit_mib)
    return Job(
        id=secrets.token_hex(4),
        name=request.name or generate_name(request.command or [request.kind]),
        uid=peer.uid,
        pid=peer.pid,
        start_ticks=peer.start_ticks,
        request=Request(
            memory=memory,
            # A weight guarantees no compute, so none is reserved.
            compute=0 if request.gpu_core_mode == "weight" else request.gpu_core,
            cards=request.cards,
            whole=request.whole,
            models=frozenset(request.models),
        ),
        compute_percent=request.gpu_core,
        compute_mode=request.gpu_core_mode,
        summary=_summary(request),
        command=request.command,
        directory=request.directory,
        kind=request.kind,
        isolation=request.isolation,
        allow_user_namespaces=request.allow_user_namespaces,
        requested_at=0,
        priority=request.priority,
        time_limit_s=request.time_limit_s,
    )


def _summary(request: protocol.SubmitJob) -> str:
    amount = "whole" if request.whole else request.gpu_mem
    if request.gpu_core:
        amount += f", {request.gpu_core}% {request.gpu_core_mode}"
    amount = f"{request.cards} x {amount}" if request.cards > 1 else amount
    return amount if request.gang is None else f"gang of {request.gang}: {amount}"
