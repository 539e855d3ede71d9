"""JobSpec: what a user wants to run, independent of where it runs.

The command line parses its options into it, and the workstation's protocol carries it.
"""

import math
import re
import secrets
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, Self

import msgspec

from fenka.core.mig.instances import GANG_IN_INSTANCES
from fenka.core.request import ComputeMode, InvalidRequest
from fenka.formats.mig_profiles import parse_inside, parse_profile
from fenka.isolation.lease_control import constant

JobKind = Literal["run", "notebook", "training", "service", "container"]
Isolation = Literal["namespace", "cooperative"]
Topology = Literal["any", "preferred", "required"]

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
"""A job's name is part of paths, and other users' commands print it."""

MAX_MEMBERS = 256
"""More than any machine has cards, and few enough to be placed within a moment."""

MAX_PRIORITY = 1_000_000
"""Also the lower limit, negated."""

MAX_EVICTION_GRACE_S = 300.0
"""Others wait for the cards of an evicted job no longer than this."""

MAX_MODELS = 64
MAX_VALUE_CHARACTERS = 128
"""Of a size or a model's name."""

MAX_COMMAND_CHARACTERS = 2048
"""As much of a command is recorded, for people to recognise it."""

MAX_PATH_CHARACTERS = 4096


class GpuResources(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The GPU request of each process of a job.

    Attributes:
        memory: Memory per card as typed, `4` or `4096MiB`; empty for whole cards.
        core: Percent of each card's time; 0 for what others leave.
        core_mode: What `core` means: a limit, a limit that idle time extends, or a weight.
        cards: Slices on this many different cards, or this many whole cards.
        whole: Take whole cards instead of slices.
        models: Acceptable card models; empty for any.
        mig: The MIG profile of instances of its own, as many as `cards`; empty for none.
        inside: The profile of the instances in which it gets slices, or `mig` for any; empty for cards.
        topology: `required` if NVLink must connect each two of its cards, `preferred` if the node is chosen
            by connections, too; `any` if only the cards on it are.
    """

    memory: str = ""
    core: int = 0
    core_mode: ComputeMode = "hard"
    cards: int = 1
    whole: bool = False
    models: list[str] = []
    mig: str = ""
    inside: str = ""
    topology: Topology = "any"

    def describe(self) -> str:
        """Return a short text for screens, such as `2 x 4, 30% soft`."""
        text = self.mig or ("whole" if self.whole else self.memory)
        text += f" inside {self.inside}" if self.inside else ""
        if self.core:
            text += f", {self.core}% {self.core_mode}"
        return f"{self.cards} x {text}" if self.cards > 1 else text

    def validate(self) -> None:
        """Check what can be checked without knowing any card. Raises InvalidRequest."""
        if (
            len(self.models) > MAX_MODELS
            or max(map(len, [self.memory, *self.models, self.mig, self.inside]))
            > MAX_VALUE_CHARACTERS
        ):
            raise InvalidRequest(
                f"a request has at most {MAX_MODELS} models, and sizes and models at most "
                f"{MAX_VALUE_CHARACTERS} characters"
            )
        if self.mig:
            parse_profile(self.mig)
            if self.memory or self.core or self.whole or self.inside:
                raise InvalidRequest(
                    f"an instance {self.mig} comes with all its memory and compute: leave out --gpu-mem, "
                    "--gpu-core, --gpus and --inside"
                )
        if self.inside:
            parse_inside(self.inside)
            if self.whole:
                raise InvalidRequest(
                    "a slice inside an instance is no whole card: leave out --gpus"
                )
        if self.topology != "any" and (self.cards < 2 or self.mig or self.inside):
            raise InvalidRequest(
                f"--topology {self.topology} is about several cards: ask for more than one with --gpus or "
                "--cards"
            )
        max_cards = constant("FENKA_MAX_CARDS")
        if self.cards > max_cards:
            raise InvalidRequest(f"one lease has at most {max_cards} cards, not {self.cards}")


class JobSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A job.

    Attributes:
        command: The program and its arguments.
        gpu: The resources of each process.
        name: The name for all commands; empty to have one generated.
        kind: What the command is.
        directory: The working directory.
        gang: Number of processes that start together; None for a single process.
        members: The resources of each process of the gang, if they differ; empty if each gets `gpu`.
        priority: Larger numbers are served first.
        time_limit_s: Seconds after which the job is ended; None for no limit.
        isolation: How the limits are enforced.
        allow_user_namespaces: The programs may create user namespaces, in which they can undo the limits.
        allow_unlimited_drivers: The programs of slices may use OpenCL, Vulkan, EGL and OpenGL on the card,
            which no limit covers.
        run: Its number among the runs of this name that have left a log; 0 if it leaves none.
        team: Who its usage counts for, beside its user; empty for the user's primary group.
        eviction_grace_s: The gang or container is evicted when a request of higher priority needs its cards,
            and may checkpoint for so many seconds; None if it is never evicted.
    """

    command: list[str] = []
    gpu: GpuResources = GpuResources()
    name: str = ""
    kind: JobKind = "run"
    directory: str = ""
    gang: int | None = None
    members: list[GpuResources] = []
    priority: int = 0
    time_limit_s: float | None = None
    isolation: Isolation = "namespace"
    allow_user_namespaces: bool = False
    eviction_grace_s: float | None = None
    run: int = 0
    team: str = ""
    allow_unlimited_drivers: bool = False

    def validate(self) -> None:
        """Check what can be checked without a daemon. Raises InvalidRequest."""
        if self.name and not NAME.fullmatch(self.name):
            raise InvalidRequest(
                f"invalid job name {self.name[:80]!r}: use letters, digits, '.', '-' and '_', starting with "
                "a letter or digit, at most 63 characters"
            )
        if self.team and not NAME.fullmatch(self.team):
            raise InvalidRequest(
                f"invalid --team {self.team[:80]!r}: use letters, digits, '.', '-' and '_', starting with a "
                "letter or digit, at most 63 characters"
            )
        if self.gang is not None and not 1 <= self.gang <= MAX_MEMBERS:
            raise InvalidRequest(f"a gang has 1 to {MAX_MEMBERS} members, not {self.gang}")
        if self.members and len(self.members) != self.gang:
            raise InvalidRequest(
                f"{len(self.members)} members are described, but the gang has {self.gang or 'none'}"
            )
        if self.time_limit_s is not None and not 0 < self.time_limit_s < math.inf:
            raise InvalidRequest(
                f"--time-limit must be a positive number of seconds, got {self.time_limit_s:g}"
            )
        check_priority(self.priority)
        grace_s = self.eviction_grace_s
        evictable = self.gang is not None or self.kind == "container"
        if grace_s is not None and not (evictable and 0 <= grace_s <= MAX_EVICTION_GRACE_S):
            raise InvalidRequest(
                f"only gangs and containers are evicted, within 0 to {MAX_EVICTION_GRACE_S:.0f} s, not "
                f"{grace_s:g} s"
            )
        for gpu in self.requests:
            gpu.validate()
            if self.gang is not None and (gpu.mig or gpu.inside):
                raise InvalidRequest(GANG_IN_INSTANCES)

    @property
    def requests(self) -> list[GpuResources]:
        """The processes' GPU requests, in the order of their ranks."""
        return self.members or [self.gpu] * (self.gang or 1)

    def truncate(self) -> Self:
        """Return the spec with the part of its command and directory that is recorded, as valid text."""
        words, left = list[str](), MAX_COMMAND_CHARACTERS
        for word in map(_as_text, self.command):
            if left < len(word):
                words.append(word[: max(left, 0)] + "…")
                break
            words.append(word)
            left -= len(word) + 1
        return msgspec.structs.replace(
            self, command=words, directory=_as_text(self.directory)[:MAX_PATH_CHARACTERS]
        )


def check_priority(priority: int) -> None:
    """Raise InvalidRequest unless a job may have this priority, whoever's it is."""
    if abs(priority) > MAX_PRIORITY:
        raise InvalidRequest(
            f"--priority must be from -{MAX_PRIORITY} to {MAX_PRIORITY}, not {str(priority)[:40]}"
        )


def summarise(requests: Sequence[GpuResources], gang: int | None) -> str:
    """Return what a job requests, as screens show it.

    Args:
        requests: What each of its processes gets.
        gang: The number of processes that start together; None for a single process.
    """
    counts = Counter(gpu.describe() for gpu in requests)
    amounts = [f"{count} of {amount}" for amount, count in counts.items()]
    text = "; ".join(amounts) if len(counts) > 1 else next(iter(counts))
    return text if gang is None else f"gang of {gang}: {text}"


def generate_name(command: list[str]) -> str:
    """Return a name for a job that was given none."""
    program = re.sub(r"[^A-Za-z0-9._-]+", "-", Path(command[0]).name).lstrip("._-")[:56]
    return f"{program or 'job'}-{secrets.token_hex(2)}"


def _as_text(text: str) -> str:
    """Replace what is no text: names of files need not be."""
    return text.encode(errors="replace").decode()
