"""What a client asks for, as jobs: the values are checked here, whoever sent them."""

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
"""Of a gang: beyond any machine's cards, and few enough to be planned within a moment."""

MAX_PRIORITY = 1_000_000
"""And the negative of it: what people can tell apart."""


NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
"""Of a job: it is part of paths, and of what other users' commands print."""

MAX_COMMAND_CHARACTERS = 2048
"""As much of a command is recorded, for people to recognise it."""

MAX_MODELS = 64
MAX_PATH_CHARACTERS = 4096
MAX_VALUE_CHARACTERS = 128
"""Of a size, or a model's name."""


@dataclass(frozen=True, slots=True)
class Peer:
    """The process that asks, its user and its start, from the kernel."""

    pid: int
    uid: int
    start_ticks: int


def validate(ask: protocol.SubmitJob) -> None:
    """What can be said without a daemon, so that no client need send it. Raises InvalidRequest."""
    if ask.name and not NAME.fullmatch(ask.name):
        raise InvalidRequest(
            f"{ask.name[:80]!r} is no name: use letters, digits, dots, dashes and underscores, 63 at most"
        )
    short = [ask.gpu_mem, *ask.models]
    if len(ask.models) > MAX_MODELS or max(map(len, short)) > MAX_VALUE_CHARACTERS:
        raise InvalidRequest(
            f"a request has at most {MAX_MODELS} models, and sizes and models at most {MAX_VALUE_CHARACTERS} "
            "characters"
        )
    if ask.gang is not None and not 1 <= ask.gang <= MAX_MEMBERS:
        raise InvalidRequest(f"a gang has 1 to {MAX_MEMBERS} members, not {ask.gang}")
    if ask.time_limit_s is not None and not 0 < ask.time_limit_s < math.inf:
        raise InvalidRequest(
            f"--time-limit must be a positive number of seconds, got {ask.time_limit_s:g}"
        )
    if abs(ask.priority) > MAX_PRIORITY:
        raise InvalidRequest(
            f"a priority is a number from -{MAX_PRIORITY} to {MAX_PRIORITY}, not {ask.priority}"
        )
    most = constant("FENKA_MAX_CARDS")
    if ask.cards > most:
        raise InvalidRequest(f"one lease has at most {most} cards, not {ask.cards}")


def truncate(ask: protocol.SubmitJob) -> protocol.SubmitJob:
    """The request with as much of its command and directory as others are shown, in characters that can be
    written."""
    words, left = list[str](), MAX_COMMAND_CHARACTERS
    for word in map(_readable, ask.command):
        if left < len(word):
            words.append(word[: max(left, 0)] + "…")
            break
        words.append(word)
        left -= len(word) + 1
    return msgspec.structs.replace(
        ask, command=words, directory=_readable(ask.directory)[:MAX_PATH_CHARACTERS]
    )


def generate_name(command: list[str]) -> str:
    """A name for a job whose user gives it none."""
    program = re.sub(r"[^A-Za-z0-9._-]+", "-", Path(command[0]).name).lstrip("._-")[:56]
    return f"{program or 'job'}-{secrets.token_hex(2)}"


def _readable(text: str) -> str:
    """Names of files need not be text."""
    return text.encode(errors="replace").decode()


def create_jobs(
    ask: protocol.SubmitJob, who: Peer, unit_mib: int, here: Collection[Job], now: float
) -> list[Job]:
    """One job, or the members of a gang. here: all jobs there are. Raises InvalidSize, InvalidRequest."""
    validate(ask)
    ask = truncate(ask)
    if ask.priority > 0 and who.uid not in (0, os.geteuid()):
        raise InvalidRequest(
            f"a priority above 0 is for {user_name(os.geteuid())} to give, whose daemon this is: ask for "
            f"0 or less, not {ask.priority}"
        )
    one = _create_job(ask, who, unit_mib)
    if any(one.name in (job.display_name, job.name, job.id) for job in here):
        raise InvalidRequest(f"a job called {one.name} is already here: choose another --name")
    # Later than all that wait, also when the clock was set back.
    one.requested_at = max([now, *(job.requested_at + 1e-3 for job in here)])
    if ask.gang is None:
        return [one]
    gang = Gang(one.id, one.name, ask.gang, one.pid, one.start_ticks)
    return [
        msgspec.structs.replace(
            one, id=secrets.token_hex(4), name=f"{one.name}/{rank}", gang=gang, rank=rank
        )
        for rank in range(ask.gang)
    ]


def _create_job(ask: protocol.SubmitJob, who: Peer, unit_mib: int) -> Job:
    memory = None if ask.whole else parse_memory(ask.gpu_mem, unit_mib)
    identity = secrets.token_hex(4)
    return Job(
        id=identity,
        name=ask.name or generate_name(ask.command or [ask.kind]),
        uid=who.uid,
        pid=who.pid,
        start_ticks=who.start_ticks,
        request=Request(
            memory=memory,
            # A weight is no promise: nothing is set aside for it.
            compute=0 if ask.gpu_core_mode == "weight" else ask.gpu_core,
            cards=ask.cards,
            whole=ask.whole,
            models=frozenset(ask.models),
        ),
        compute_percent=ask.gpu_core,
        compute_mode=ask.gpu_core_mode,
        summary=_summary(ask),
        command=ask.command,
        directory=ask.directory,
        kind=ask.kind,
        isolation=ask.isolation,
        allow_user_namespaces=ask.allow_user_namespaces,
        requested_at=0,
        priority=ask.priority,
        time_limit_s=ask.time_limit_s,
    )


def _summary(ask: protocol.SubmitJob) -> str:
    each = "whole" if ask.whole else ask.gpu_mem
    if ask.gpu_core:
        each += f", {ask.gpu_core}% {ask.gpu_core_mode}"
    each = f"{ask.cards} x {each}" if ask.cards > 1 else each
    return each if ask.gang is None else f"gang of {ask.gang}: {each}"
