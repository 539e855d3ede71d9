"""What a client asks for, as jobs: the values are checked here, whoever sent them."""

import math
import os
import secrets
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

import msgspec

from fenka.core.requests import BadRequest, Request
from fenka.dialects.sizes import parse_memory
from fenka.hardware.peers import user_name
from fenka.isolation.layout import constant
from fenka.workstation import members, protocol
from fenka.workstation.broker import Gang, Job

MOST_MEMBERS = 256
"""Of a gang: beyond any machine's cards, and few enough to be planned within a moment."""

MOST_PRIORITY = 1_000_000
"""And the negative of it: what people can tell apart."""


@dataclass(frozen=True, slots=True)
class Who:
    """The process that asks and its user, from the kernel."""

    pid: int
    uid: int


def check(ask: protocol.Ask) -> None:
    """What can be said without a daemon, so that no client need send it. Raises BadRequest."""
    if ask.gang is not None and not 1 <= ask.gang <= MOST_MEMBERS:
        raise BadRequest(f"a gang has 1 to {MOST_MEMBERS} members, not {ask.gang}")
    if ask.limit_s is not None and not 0 < ask.limit_s < math.inf:
        raise BadRequest(
            f"--for takes seconds, more than none, not {ask.limit_s:g}; leave it out for no limit"
        )
    if abs(ask.priority) > MOST_PRIORITY:
        raise BadRequest(
            f"a priority is a number from -{MOST_PRIORITY} to {MOST_PRIORITY}, not {ask.priority}"
        )
    most = constant("FENKA_MAX_CARDS")
    if ask.cards > most:
        raise BadRequest(f"one lease has at most {most} cards, not {ask.cards}")


def jobs(
    ask: protocol.Ask, who: Who, unit_mib: int, here: Collection[Job], now: float
) -> list[Job]:
    """One job, or the members of a gang. here: all jobs there are. Raises BadSize, BadRequest."""
    check(ask)
    if ask.priority > 0 and who.uid not in (0, os.geteuid()):
        raise BadRequest(
            f"a priority above 0 is for {user_name(os.geteuid())} to give, whose daemon this is: ask for "
            f"0 or less, not {ask.priority}"
        )
    one = _one(ask, who, unit_mib)
    if any(one.name in (job.title, job.name, job.id) for job in here):
        raise BadRequest(f"a job called {one.name} is already here: choose another --name")
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


def _one(ask: protocol.Ask, who: Who, unit_mib: int) -> Job:
    memory = None if ask.whole else parse_memory(ask.gpu_mem, unit_mib)
    identity = secrets.token_hex(4)
    program = Path(ask.command[0]).name if ask.command else ask.kind
    ticks = members.start_ticks(who.pid)
    if ticks is None:
        raise BadRequest("the process that asked is gone")
    return Job(
        id=identity,
        name=ask.name or f"{program}-{identity[:4]}",
        uid=who.uid,
        pid=who.pid,
        start_ticks=ticks,
        request=Request(
            memory=memory,
            # A weight is no promise: nothing is set aside for it.
            compute=0 if ask.gpu_core_mode == "weight" else ask.gpu_core,
            cards=ask.cards,
            whole=ask.whole,
            models=frozenset(ask.models),
        ),
        core=ask.gpu_core,
        core_mode=ask.gpu_core_mode,
        wanted=_wanted(ask),
        command=ask.command,
        directory=ask.directory,
        kind=ask.kind,
        isolation=ask.isolation,
        requested_at=0,
        priority=ask.priority,
        limit_s=ask.limit_s,
    )


def _wanted(ask: protocol.Ask) -> str:
    each = "whole" if ask.whole else ask.gpu_mem
    if ask.gpu_core:
        each += f", {ask.gpu_core}% {ask.gpu_core_mode}"
    each = f"{ask.cards} x {each}" if ask.cards > 1 else each
    return each if ask.gang is None else f"gang of {ask.gang}: {each}"
