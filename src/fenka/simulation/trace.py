"""Traces as files: nodes and pods in the columns of Alibaba's openb trace, orders of arrival, ranks of nodes.

A card of a trace has 1,000 parts, which the core counts as MiB of card memory.
"""

import csv
import gzip
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import TextIO, TypeVar

from fenka.core.errors import INVALID_INPUT, FenkaError
from fenka.core.inventory import Card, DeviceId, Node
from fenka.core.policies.candidates import FULL
from fenka.core.request import InvalidRequest, Memory, Request
from fenka.core.topology.domains import Topology

T = TypeVar("T")

MAX_CARDS = 64
"""Of one node: no machine has more."""


class InvalidTrace(FenkaError):
    """A file of a trace cannot be used; the message says which, where and why."""

    exit_code = INVALID_INPUT


@dataclass(frozen=True, slots=True)
class PodTimes:
    """When a pod came and how long it ran, as a trace has it, in seconds.

    Attributes:
        created: since the trace's start.
        runs_s: from its start to its end; of a pod that never started, from its creation.
        waited_s: from its creation to its start; None if it never started.
    """

    created: float
    runs_s: float
    waited_s: float | None


@dataclass(frozen=True, slots=True)
class TracePod:
    """A pod of a trace.

    Attributes:
        name: of the pod.
        request: what it requests.
        parts: thousandths of cards that it requests in all.
        times: None if the trace has none.
        gang: pods of the same one start together; empty for none.
        user: among whom cards are shared.
        priority: the largest is served first.
        level: the topology level on which its gang is placed in one domain; empty for the innermost.
        required: whether it must be one domain.
    """

    name: str
    request: Request
    parts: int
    times: PodTimes | None = None
    gang: str = ""
    user: str = ""
    priority: int = 0
    level: str = ""
    required: bool = False


@dataclass(frozen=True, slots=True)
class Trace:
    """A trace.

    Attributes:
        nodes: in the order of their names.
        topology: their domains, None if the trace has none.
    """

    nodes: tuple[Node, ...]
    pods: tuple[TracePod, ...]
    topology: Topology | None = None

    @property
    def parts(self) -> int:
        """The thousandths of cards that all nodes have."""
        return FULL * sum(len(node.cards) for node in self.nodes)


def read_trace(nodes: Path, pods: Path, levels: tuple[str, ...] = ()) -> Trace:
    """Read a trace.

    Args:
        nodes: its nodes.
        pods: its pods.
        levels: columns of the nodes that name topology domains, the outermost first.

    Raises:
        InvalidTrace: a file cannot be used.
    """
    rows = list(_read(nodes, (*NODE_COLUMNS, *levels), lambda row: (_node(row), row)))
    nodes_read = sorted((node for node, _ in rows), key=lambda node: node.name)
    topology = Topology.of(levels, ((node.name, row) for node, row in rows)) if levels else None
    pods_read = tuple(_read(pods, POD_COLUMNS, _pod))
    named = {pod.level for pod in pods_read} - {"", *levels}
    if named:
        raise InvalidTrace(
            f"{pods}: {min(named)!r} is no topology level: name the nodes' columns by --topology-level"
        )
    _check_names(nodes, [node.name for node in nodes_read])
    _check_names(pods, [pod.name for pod in pods_read])
    if not any(node.cards for node in nodes_read):
        raise InvalidTrace(f"{nodes}: no node has a card; its column gpu has the number of cards")
    return Trace(tuple(nodes_read), pods_read, topology)


def read_arrivals(file: Path, trace: Trace) -> list[TracePod]:
    """Read an order of arrival: names of pods in the first column, repeated ones too. Raises InvalidTrace."""
    by_name = {pod.name: pod for pod in trace.pods}

    def pod(row: dict[str, str]) -> TracePod:
        if row["name"] not in by_name:
            raise ValueError(f"no pod is called {row['name']!r}")
        return by_name[row["name"]]

    return list(_read(file, ("name",), pod))


def read_ranks(file: Path, trace: Trace) -> list[int]:
    """Read the rank of each node, in the order of the nodes' names. Raises InvalidTrace."""
    rows = _read(
        file,
        ("sorted_node_index", "prefix"),
        lambda row: (_number(row, "sorted_node_index"), _number(row, "prefix")),
    )
    ranks = dict(rows)
    count = len(trace.nodes)
    if sorted(ranks) != list(range(count)) or sorted(ranks.values()) != list(range(count)):
        raise InvalidTrace(
            f"{file}: the ranks must give each of the {count} nodes another number from 0 to {count - 1}"
        )
    return [ranks[number] for number in range(count)]


def ranked(trace: Trace, ranks: Sequence[int]) -> tuple[Node, ...]:
    """Return the nodes under names by which equal nodes are taken in the order of these ranks."""
    width = len(str(len(ranks)))
    return tuple(
        Node(
            f"{rank:0{width}}-{node.name}",
            node.cards,
            node.cpu_milli,
            node.memory_mib,
            node.unit_mib,
        )
        for rank, node in zip(ranks, trace.nodes, strict=True)
    )


def inflated(trace: Trace, load: float, random: Random) -> list[TracePod]:
    """Return all pods in random order, then drawn ones, until they request this part of all cards.

    If all pods together request more, pods chosen at random are left out.
    """
    pods = list(trace.pods)
    random.shuffle(pods)
    requested, most = sum(pod.parts for pod in pods), load * trace.parts
    while requested > most:
        requested -= pods.pop(random.randrange(len(pods))).parts
    if not requested:
        return pods
    while True:
        pod = random.choice(trace.pods)
        if requested + pod.parts > most:
            return pods
        pods.append(pod)
        requested += pod.parts


NODE_COLUMNS = ("sn", "cpu_milli", "memory_mib", "gpu", "model")
TIME_COLUMNS = ("creation_time", "deletion_time")
REQUIRED_COLUMN, PREFERRED_COLUMN = "required_topology", "preferred_topology"
POD_COLUMNS = ("name", "cpu_milli", "memory_mib", "num_gpu", "gpu_milli")


def _node(row: dict[str, str]) -> Node:
    count, name = _number(row, "gpu"), row["sn"]
    if count > MAX_CARDS:
        raise ValueError(f"a node has at most {MAX_CARDS} cards, not {count}")
    cards = tuple(
        Card(index, DeviceId(f"{name}-{index}"), row["model"], FULL) for index in range(count)
    )
    return Node(name, cards, _number(row, "cpu_milli"), _number(row, "memory_mib"), unit_mib=1)


def _pod(row: dict[str, str]) -> TracePod:
    cards = _number(row, "num_gpu")
    parts = _number(row, "gpu_milli") if cards else 0
    if parts > FULL or (cards and not parts):
        raise ValueError(f"gpu_milli is 1 to {FULL} for each card, not {parts}")
    models = frozenset(filter(None, (row.get("gpu_spec") or "").split("|")))
    request = Request(
        Memory(parts) if 0 < parts < FULL else None,
        cards=cards,
        whole=parts == FULL,
        models=models if cards else frozenset(),
        # A request for nothing at all is one for the smallest part of a core.
        cpu_milli=max(_number(row, "cpu_milli"), not cards),
        host_memory_mib=_number(row, "memory_mib"),
    )
    return TracePod(
        row["name"],
        request,
        cards * parts,
        _times(row),
        row.get("gang") or "",
        row.get("user") or "",
        _number(row, "priority") if row.get("priority") else 0,
        row.get(REQUIRED_COLUMN) or row.get(PREFERRED_COLUMN) or "",
        bool(row.get(REQUIRED_COLUMN)),
    )


def _times(row: dict[str, str]) -> PodTimes | None:
    if not all(row.get(column) for column in TIME_COLUMNS):
        return None
    created, deleted = (_seconds(row, column) for column in TIME_COLUMNS)
    scheduled = _seconds(row, "scheduled_time") if row.get("scheduled_time") else None
    started = created if scheduled is None else scheduled
    if not created <= started <= deleted:
        raise ValueError("creation_time, scheduled_time and deletion_time must ascend")
    return PodTimes(created, deleted - started, None if scheduled is None else scheduled - created)


def _seconds(row: dict[str, str], column: str) -> float:
    text = row[column]
    if not re.fullmatch(r"[0-9]{1,12}(?:\.[0-9]{1,9})?", text):
        raise ValueError(f"{column} must be seconds, not {text[:20]!r}")
    return float(text)


def _number(row: dict[str, str], column: str) -> int:
    text: str | None = row[column]
    if text is None:
        raise ValueError(f"there is no {column}")
    # Python reads no number of thousands of digits.
    if not (text.isascii() and text.isdecimal() and len(text) < 16):
        raise ValueError(f"{column} must be a whole number, not {text[:20]!r}")
    return int(text)


def _check_names(file: Path, names: list[str]) -> None:
    if not names:
        raise InvalidTrace(f"{file} has no rows below its header")
    if len(set(names)) < len(names):
        name = next(name for name in names if names.count(name) > 1)
        raise InvalidTrace(f"{file}: two rows have the name {name!r}")


def _read(
    file: Path, columns: tuple[str, ...], convert: Callable[[dict[str, str]], T]
) -> Iterator[T]:
    """Yield the converted rows of a CSV file, which may be compressed. Raises InvalidTrace."""
    try:
        with _open(file) as lines:
            reader = csv.DictReader(lines)
            missing = [name for name in columns if name not in (reader.fieldnames or ())]
            if missing:
                raise InvalidTrace(
                    f"{file} has no column {missing[0]}: its first line must name {', '.join(columns)}"
                )
            for row in reader:
                try:
                    yield convert(row)
                except (ValueError, InvalidRequest) as error:
                    raise InvalidTrace(f"{file}, line {reader.line_num}: {error}") from None
    except OSError as error:
        raise InvalidTrace(f"cannot read {file}: {error.strerror or error}") from None
    except (UnicodeDecodeError, EOFError, csv.Error) as error:
        raise InvalidTrace(f"{file} is no CSV file: {error}") from None


def _open(file: Path) -> TextIO:
    if file.suffix == ".gz":
        return gzip.open(file, "rt", encoding="utf-8", newline="")
    return file.open(encoding="utf-8", newline="")
