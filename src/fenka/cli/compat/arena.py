"""Nodes and training jobs in the layout of arena 0.7 and later; the order of rows is stable.

Errors of arena are not copied. Roles of GPU nodes, memory of nodes with unit MiB, and `-m n` are right here.
Slices count as shares of a card, the age of an instance is its own, and only cards that an instance holds are
allocated.
"""

from collections.abc import Callable, Sequence

from fenka.cli import tables
from fenka.cli.common_options import short_duration
from fenka.cli.workloads import screens
from fenka.core.inventory import WHOLE_COMPUTE
from fenka.core.units import MIB, format_units
from fenka.dialects import ack
from fenka.views.node_rows import MODES, NO_ROLE, RESOURCES, Mode, NodeRow, ProgramRow
from fenka.views.workloads import TrainingJob

RULE, SHARE_RULE = 99, 107

TYPES: dict[Mode, str] = {
    "none": "Normal",
    "exclusive": "GPUExclusive",
    "topology": "GPUTopology",
    "share": "GPUShare",
}
KEYS: dict[Mode, str] = {
    "exclusive": "gpuExclusiveNodes",
    "share": "gpuShareNodes",
    "topology": "gpuTopologyNodes",
    "none": "normalNodes",
}
DESCRIPTIONS: dict[Mode, tuple[str, ...]] = {
    "none": ("This node has none gpu devices",),
    "exclusive": (
        "1.This node is enabled gpu exclusive mode.",
        "2.Pods can request resource 'nvidia.com/gpu' to use gpu exclusive feature on this node",
    ),
    "topology": (
        "1.This node is enabled gpu topology mode.",
        "2.Pods can request resource 'aliyun.com/gpu' to use gpu topology feature on this node",
    ),
    "share": (
        "1.This node is enabled gpu sharing mode.",
        # arena ends this line with a blank, too.
        "2.Pods can request resource 'aliyun.com/gpu-mem' to use gpu sharing feature on this node ",
    ),
}


Column = Callable[[NodeRow], str]


def show(rows: Sequence[NodeRow], mode: str, *, details: bool, foot: bool, output: str) -> None:
    """Print the nodes of one kind.

    Args:
        rows: The nodes.
        mode: A word of MODES or its first letter; empty for all nodes.
        details: Print a block per node instead of a line.
        foot: Print the totals below the lines.
        output: table, json or yaml.
    """
    wanted = next((word for word in MODES if mode and word.startswith(mode)), None)
    rows = sorted(
        (row for row in rows if wanted in (None, row.mode)),
        key=lambda row: (MODES.index(row.mode), row.name),
    )
    if not tables.print_data(document(rows), output, arena=True):
        tables.print_lines(details_screen(rows) if details else summary_screen(rows, foot=foot))


def summary_screen(rows: Sequence[NodeRow], *, foot: bool = True) -> list[str]:
    """Return one line per node. Nodes of a single kind have that kind's columns."""
    modes = {row.mode for row in rows}
    if modes == {"share"}:
        return _share_summary(rows, foot=foot)
    kinds, unhealthy = modes - {"none"}, any(row.unhealthy for row in rows)
    columns: dict[str, Column] = {
        **_NODE_COLUMNS,
        "GPU(Total)": lambda row: str(row.count),
        "GPU(Allocated)": lambda row: f"{_cards_taken(row):g}",
    }
    if len(kinds) > 1:
        columns["GPU(Mode)"] = lambda row: row.mode
    if unhealthy:
        columns["UNHEALTHY"] = lambda row: str(row.unhealthy)
    own = (
        f"of nodes which own resource {RESOURCES[rows[0].mode]} "
        if len(modes) == len(kinds) == 1
        else ""
    )
    feet = [*_foot(f"GPUs {own}", _taken(rows), rows), *_unhealthy_foot(rows)]
    return [*tables.align(tables.tabulate(rows, columns)), "-" * RULE, *(feet if foot else [])]


def _share_summary(rows: Sequence[NodeRow], *, foot: bool) -> list[str]:
    columns: dict[str, Column] = {
        **_NODE_COLUMNS,
        "GPUs(Allocated/Total)": lambda row: f"{_cards_taken(row):g}/{row.count}",
        "GPU_MEMORY(Allocated/Total)": lambda row: (
            f"{_allocated_gib(row):.1f}/{_total_gib(row):.1f} GiB"
        ),
        "GPU_CORE(Allocated/Total)": lambda row: (
            f"{_core_taken(row)}/{_core_total(row)}" if row.core else "__"
        ),
    }
    own = f"of nodes which own resource {RESOURCES['share']}"
    allocated, total = sum(map(_allocated_gib, rows)), sum(map(_total_gib, rows))
    feet = [
        *_foot(f"GPUs {own} ", _taken(rows), rows),
        f"Allocated/Total GPU Memory {own} In Cluster:",
        f"{allocated:.1f}/{total:.1f} GiB({_percent(allocated, total)})",
        *_core_foot(rows),
        *_unhealthy_foot(rows),
    ]
    lines = tables.align(tables.tabulate(rows, columns))
    return [*lines, "-" * SHARE_RULE, *(feet if foot else [])]


def _core_foot(rows: Sequence[NodeRow]) -> list[str]:
    of = [row for row in rows if row.core]
    if not of:
        return []
    taken, total = sum(map(_core_taken, of)), sum(map(_core_total, of))
    return [
        f"Allocated/Total GPU Core of nodes which own resource {ack.CORE} In Cluster:",
        f"{taken}/{total} ({_percent(taken, total)})",
    ]


def _core_taken(row: NodeRow) -> int:
    """Return the allocated percent of its cards' time; a whole card counts 100."""
    return sum(card.core for card in row.cards)


def _core_total(row: NodeRow) -> int:
    return WHOLE_COMPUTE * row.count if row.core else 0


def _foot(subject: str, part: float, rows: Sequence[NodeRow], verb: str = "Allocated") -> list[str]:
    whole = sum(row.count for row in rows)
    share = _percent(part, whole)
    return [f"{verb}/Total {subject}In Cluster:", f"{part:g}/{whole} ({share})"]


def _unhealthy_foot(rows: Sequence[NodeRow]) -> list[str]:
    unhealthy = sum(row.unhealthy for row in rows)
    return _foot("GPUs ", unhealthy, rows, "Unhealthy") if unhealthy else []


def details_screen(rows: Sequence[NodeRow]) -> list[str]:
    """Return one block per node."""
    lines: list[str] = []
    for row in rows:
        head = [
            ("Name:", row.name),
            ("Status:", _status(row)),
            ("Role:", row.role),
            ("Type:", TYPES[row.mode]),
            ("Address:", row.address),
        ]
        lines += [
            "",
            *(f"{label:<9}{value}" for label, value in head),
            "Description:",
            *(f"  {line}" for line in DESCRIPTIONS[row.mode]),
            *_DETAILS[row.mode](row),
            "",
        ]
    return lines


def _share_details(row: NodeRow) -> list[str]:
    gib = row.unit_mib / 1024
    pods = [
        (
            *(pod.namespace, pod.name, f"{_units(pod) * gib:.1f} GiB"),
            ",".join(
                f"gpu{index}({units * gib:.1f}GiB)"
                for index, units in sorted(pod.allocated.items())
            ),
            *(_core_cells(pod) if row.core else ()),
        )
        for pod in row.programs
    ]
    cards = [
        (
            str(card.index),
            f"{format_units(card.total * gib)} GiB",
            f"{format_units(card.allocated * gib)} GiB({_percent(card.allocated, card.total)})",
            *(
                (str(WHOLE_COMPUTE), f"{card.core}({_percent(card.core, WHOLE_COMPUTE)})")
                if row.core
                else ()
            ),
        )
        for card in row.cards
    ]
    of_pods = ("GPU_CORE(Requested)", "GPU_CORE(Allocated)") if row.core else ()
    of_cards = ("CORE(Total)", "CORE(Allocated)") if row.core else ()
    return [
        *_table(
            "Instances:",
            ("NAMESPACE", "NAME", "GPU_MEM(Requested)", "GPU_MEM(Allocated)", *of_pods),
            pods,
        ),
        *_table("GPUs:", ("INDEX", "MEMORY(Total)", "MEMORY(Allocated)", *of_cards), cards),
        "GPU Summary:",
        f"  Total GPUs: {row.count}",
        f"  Allocated GPUs: {_cards_taken(row):g}",
        f"  Unhealthy GPUs: {row.unhealthy}",
        f"  Total GPU Memory: {_total_gib(row):.1f} GiB",
        f"  Allocated GPU Memory: {_allocated_gib(row):.1f} GiB",
        *([f"  Total GPU Core: {_core_total(row)}"] if row.core else ()),
        *([f"  Allocated GPU Core: {_core_taken(row)}"] if row.core else ()),
        "",
    ]


def _core_cells(pod: ProgramRow) -> tuple[str, str]:
    asked = str(pod.weight or sum(pod.core.values()))
    asked += "" if pod.core_mode == "hard" else f" {pod.core_mode}"
    return asked, ",".join(f"gpu{index}({percent})" for index, percent in sorted(pod.core.items()))


def _whole_details(row: NodeRow) -> list[str]:
    pods = [(pod.namespace, pod.name, pod.status, str(pod.whole)) for pod in row.programs]
    return [
        *_table("Instances:", ("NAMESPACE", "NAME", "STATUS", "GPU(Requested)"), pods),
        "GPU Summary:",
        f"  Total GPUs:     {row.count}",
        f"  Allocated GPUs: {row.whole}",
        f"  Unhealthy GPUs: {row.unhealthy}",
    ]


_DETAILS: dict[Mode, Callable[[NodeRow], list[str]]] = {
    "none": lambda _: [],
    "exclusive": _whole_details,
    "topology": _whole_details,
    "share": _share_details,
}


def _table(title: str, header: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> list[str]:
    if not rows:
        return []
    rules = tuple("-" * len(cell) for cell in header)
    return [title, *(f"  {line}" for line in tables.align([header, rules, *rows]))]


def document(rows: Sequence[NodeRow]) -> dict[str, list[dict[str, object]]]:
    """Return the data of `-o json|yaml`: nodes by kind, with arena's keys. Memory is in bytes."""
    kinds: dict[str, list[dict[str, object]]] = {KEYS[mode]: [] for mode in KEYS}
    for row in rows:
        kinds[KEYS[row.mode]].append(_item(row))
    return kinds


def _item(row: NodeRow) -> dict[str, object]:
    head: dict[str, object] = {
        "name": row.name,
        "description": "\n".join(DESCRIPTIONS[row.mode]),
        "ip": row.address,
        "status": _status(row),
        "role": "" if row.role == NO_ROLE else row.role,
        "type": TYPES[row.mode],
    }
    if row.mode == "none":
        return head
    cards: dict[str, object] = {
        "totalGPUs": row.count,
        "allocatedGPUs": _cards_taken(row),
        "unhealthyGPUs": row.unhealthy,
        "gpuMetrics": [],
    }
    if row.mode != "share":
        holders = [
            {
                "name": pod.name,
                "namespace": pod.namespace,
                "status": pod.status,
                "requestGPUs": pod.whole,
            }
            for pod in row.programs
        ]
        return {"instances": holders, **cards, **head}
    unit = row.unit_mib * MIB
    return {
        "instances": [_instance(pod) for pod in row.programs],
        "totalGPUMemory": row.total * unit,
        "allocatedGPUMemory": int(row.allocated * unit),
        "totalGPUCore": _core_total(row),
        "allocatedGPUCore": _core_taken(row),
        "devices": [
            {
                "id": str(card.index),
                "totalGPUMemory": card.total * unit,
                "allocatedGPUMemory": int(card.allocated * unit),
                "totalGPUCore": WHOLE_COMPUTE if row.core else 0,
                "allocatedGPUCore": card.core,
            }
            for card in row.cards
        ],
        **cards,
        **head,
    }


def _instance(pod: ProgramRow) -> dict[str, object]:
    return {
        "name": pod.name,
        "namespace": pod.namespace,
        "status": pod.status,
        "requestGPUMemory": _units(pod),
        "requestGPUCore": sum(pod.core.values()),
        "gpuMemoryAllocation": {str(index): units for index, units in pod.allocated.items()},
        "gpuCoreAllocation": {str(index): percent for index, percent in pod.core.items()},
    }


def _units(pod: ProgramRow) -> float:
    return sum(pod.allocated.values()) + pod.pending


def _cards_taken(row: NodeRow) -> float:
    """Return the allocated cards; of a shared node those that its units would fill, to a tenth."""
    if row.mode != "share":
        return row.whole
    return round(sum(card.allocated / card.total for card in row.cards if card.total), 1)


def _allocated_gib(row: NodeRow) -> float:
    return row.allocated * row.unit_mib / 1024


def _total_gib(row: NodeRow) -> float:
    return row.total * row.unit_mib / 1024


def _taken(rows: Sequence[NodeRow]) -> float:
    return round(sum(map(_cards_taken, rows)), 1)


def _status(row: NodeRow) -> str:
    ready = {True: "Ready", False: "NotReady", None: "Unknown"}[row.ready]
    return ready if row.schedulable else f"{ready},SchedulingDisabled"


_NODE_COLUMNS: dict[str, Column] = {
    "NAME": lambda row: row.name,
    "IPADDRESS": lambda row: row.address,
    "ROLE": lambda row: row.role,
    "STATUS": _status,
}


def _percent(part: float, whole: float) -> str:
    return f"{part / whole * 100 if whole else 0:.1f}%"


def list_screen(jobs: Sequence[TrainingJob], now: float, *, all_namespaces: bool) -> list[str]:
    """Return a line for each job."""
    columns: screens.Columns[TrainingJob] = {
        "NAME": lambda job: job.name,
        "STATUS": lambda job: job.status,
        "TRAINER": screens.trainer,
        "DURATION": lambda job: screens.duration(job, now),
        "GPU(Requested)": lambda job: screens.cards(job.requested),
        "GPU(Allocated)": lambda job: (
            screens.cards(job.allocated)
            if job.status in ("PENDING", "RUNNING")
            else screens.UNKNOWN
        ),
        "NODE": screens.chief_address,
    }
    return screens.table(jobs, columns, all_namespaces=all_namespaces)


def get_screen(job: TrainingJob, now: float) -> list[str]:
    """Return the job, and a line for each instance."""
    rows = [
        (
            instance.name,
            instance.status,
            short_duration(now - instance.created),
            str(instance.chief).lower(),
            screens.cards(instance.requested),
            instance.node or screens.UNKNOWN,
        )
        for instance in job.instances
    ]
    header = ("NAME", "STATUS", "AGE", "IS_CHIEF", "GPU(Requested)", "NODE")
    return [*screens.head(job, now), *screens.block("Instances:", header, rows)]


def tensorboard_lines(job: TrainingJob) -> list[str]:
    """Return where the job's TensorBoard is; nothing without one."""
    if not job.tensorboard:
        return []
    # arena ends the second line with a blank.
    return ["", "Tensorboard:", "  Your tensorboard will be available on: ", f"  {job.tensorboard}"]


def top_screen(jobs: Sequence[TrainingJob], now: float, *, all_namespaces: bool) -> list[str]:
    """Return a line for each job, and the cards of those that run."""
    columns: screens.Columns[TrainingJob] = {
        "NAME": lambda job: job.name,
        "STATUS": lambda job: job.status,
        "TRAINER": screens.trainer,
        "AGE": lambda job: screens.duration(job, now),
        "GPU(Requested)": lambda job: screens.cards(job.requested),
        "GPU(Allocated)": lambda job: screens.cards(job.allocated),
        "NODE": screens.chief_address,
    }
    running = [job for job in jobs if job.status == "RUNNING"]
    allocated = screens.card_total(job.allocated for job in running)
    requested = screens.card_total(job.requested for job in running)
    return [
        *screens.table(jobs, columns, all_namespaces=all_namespaces),
        "",
        f"Total Allocated/Requested GPUs of Training Jobs: {allocated}/{requested}",
    ]
