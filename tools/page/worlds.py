"""Worlds to look at the dashboard's page with: a workstation, a cluster, a thousand nodes, nothing at all.

They are values of the types that the server sends, so the page shows them as it shows real ones.
"""

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field

from fenka import __version__
from fenka.views.board import (
    CardTile,
    Fleet,
    HistoryAnswer,
    NodeLine,
    PersonLine,
    ProgramDetail,
    ProgramLine,
    Series,
    SliceTile,
    Sums,
    UsageLine,
    WaitingLine,
    WaitSums,
    WorkloadLine,
    World,
)

T4_MIB, T4_UNITS, UNIT_MIB = 15079, 14, 1077
NOTEBOOK_MIB, NOTEBOOK_USED_MIB = 4308, 4307
LOST, CORDONED, IDLE, HOT, MIG = 1, 2, 4, 8, 16
"""Flags of a card in `Fleet.cards`."""


def workstation(at: float) -> World:
    """Return three notebooks on one T4; the fourth waits."""
    used = (NOTEBOOK_USED_MIB, 3344, 12)
    busy = (0.38, 0.24, 0.0)
    names = ("tf-notebook", "tf-notebook-2", "tf-notebook-3")
    users = ("anna", "ben", "ben")
    programs = [
        ProgramLine(
            f"job-{number}",
            name,
            user,
            "notebook",
            "running",
            "4",
            at - 18_300 + 600 * number,
            started_at=at - 18_290 + 600 * number,
            deadline=at + 2400 if number == 0 else None,
            cards=["0"],
            held_mib=NOTEBOOK_MIB,
            used_mib=used[number],
            busy=busy[number],
            compute=40 if number == 0 else 0,
            idle_s=10_900 if number == 2 else None,
            starts=["job-3"],
            own=user == "ben",
            address=f"http://127.0.0.1:{8888 + number}/lab",
            priority=0,
        )
        for number, (name, user) in enumerate(zip(names, users, strict=True))
    ]
    why = "no GPU fits: 1 of 1 has too little memory"
    waiting = WaitingLine(
        "job-3",
        1,
        "tf-notebook-4",
        "cara",
        "4",
        0,
        at - 312,
        reserved=["0"],
        starts_by=at + 2400,
        why=why,
        helps=["the end of tf-notebook, tf-notebook-2 or tf-notebook-3 starts it"],
    )
    programs.append(
        ProgramLine(
            "job-3", "tf-notebook-4", "cara", "notebook", "waiting", "4", at - 312, priority=0
        )
    )
    card = CardTile(
        "0",
        "",
        0,
        "GPU-7a2c51d0-93b8-4a5e-9e0f-1b2c3d4e5f60",
        "Tesla T4",
        T4_MIB,
        T4_UNITS,
        2,
        True,
        3 * NOTEBOOK_MIB,
        used_mib=sum(used) + 12,
        busy=0.62,
        temperature_c=49,
        power_w=29.4,
        power_limit_w=70.0,
        unleased_mib=12,
        unleased="12 MiB are used without a lease: Xorg (1274)",
        slices=[
            SliceTile(
                program.id,
                program.name,
                program.user,
                NOTEBOOK_MIB,
                program.used_mib,
                program.compute,
                "hard",
                program.busy,
            )
            for program in programs[:3]
        ],
    )
    return World(
        at,
        "workstation",
        "atlas",
        __version__,
        True,
        UNIT_MIB,
        [card],
        programs,
        [waiting],
        1,
        workloads=[
            WorkloadLine(
                program.name,
                program.user,
                "notebook",
                program.state,
                program.requested_at,
                address=program.address,
                why=why if program.state == "waiting" else "",
                programs=[program.id],
            )
            for program in programs
        ],
        people=[
            PersonLine("anna", NOTEBOOK_MIB, used[0], 0.38),
            PersonLine("ben", 2 * NOTEBOOK_MIB, used[1] + used[2], 0.24, idle_mib=NOTEBOOK_MIB),
            PersonLine("cara", 0, 0, 0.0, waiting=1, oldest=at - 312),
        ],
        free_mib=T4_MIB - 3 * NOTEBOOK_MIB,
        largest_mib=0,
        actions=True,
        programs_total=3,
    )


def empty(at: float) -> World:
    """Return a workstation on which nobody does anything."""
    card = CardTile(
        "0", "", 0, "GPU-1", "Tesla T4", T4_MIB, T4_UNITS, T4_UNITS, True, 0, 0, 0.0, 34, 9.0, 70.0
    )
    return World(
        at,
        "workstation",
        "atlas",
        __version__,
        True,
        UNIT_MIB,
        [card],
        [],
        [],
        0,
        free_mib=T4_MIB,
        largest_mib=T4_MIB,
        actions=True,
    )


def cluster(at: float) -> World:
    """Return a cluster of five nodes: a training, services under a peak, MIG instances, a waiting gang."""
    return _Cluster(at).world()


@dataclass(frozen=True, slots=True)
class _Run:
    """A program of the cluster. fraction: of its memory that it uses. idle: seconds; age: too."""

    name: str
    user: str
    kind: str
    cards: list[str]
    mib: int
    fraction: float
    busy: float
    compute: int = 0
    profile: str = ""
    group: str = ""
    age: float = 9_000
    idle: float | None = None
    violations: list[str] = field(default_factory=list)


_TOO_MUCH = "holds 5611 MiB of the card, 226 MiB more than its slice"

_RUNS = [
    *(
        _Run(f"resnet-worker-{index}", "vision", "training", [f"gpu-11/{index}"], 40536, 0.86, 0.97,
             group="resnet", age=52_000)
        for index in range(4)
    ),
    *(
        _Run(f"chat-v2-{index}", "assist", "service", [f"gpu-12/{index}"], 24576, 0.91, 0.88,
             compute=60, group="chat", age=3_600 * index + 500)
        for index in range(3)
    ),
    _Run("embed-v1-0", "search", "service", ["gpu-12/0"], 12288, 0.55, 0.07, 20),
    _Run("whisper-0", "assist", "service", ["gpu-12/1"], 8192, 0.7, 0.11, 20),
    _Run("bert-finetune", "nlp", "training", ["gpu-12/3"], 36864, 0.93, 0.99, age=5_400),
    _Run("tf-notebook-7cf4575d78-9gxzd", "default", "notebook", ["gpu-17/0"], 4308, 1, 0.31, 40),
    _Run("tf-notebook-2-7b4d68d8f7-wxlff", "default", "notebook", ["gpu-17/0"], 4308, 0.776, 0.2),
    _Run("tf-notebook-3-86c48d4c7d-lk9h8", "default", "notebook", ["gpu-17/0"], 4308, 0.003, 0.0,
         idle=88_000),
    _Run("sweep-14", "nlp", "run", ["gpu-17/1"], 8616, 0.64, 0.72),
    _Run("sweep-15", "nlp", "run", ["gpu-17/1"], 5385, 0.68, 0.25, violations=[_TOO_MUCH]),
    _Run("annotate", "vision", "notebook", ["gpu-18/0"], 6462, 0.05, 0.0, idle=11_000),
    _Run("ocr-a", "search", "service", ["mig-01/0"], 9984, 0.71, 0.4, profile="2g.10gb"),
    _Run("ocr-b", "search", "service", ["mig-01/0"], 4864, 0.4, 0.2, profile="1g.5gb"),
    _Run("rank-1", "search", "service", ["mig-01/1"], 20096, 0.8, 0.55, profile="3g.20gb"),
]  # fmt: skip


class _Cluster:
    """Builds the cluster step by step: first cards, then who is on them."""

    def __init__(self, at: float) -> None:
        self._at = at
        self._cards = {
            f"{node}/{index}": self._card(node, index, model, mib)
            for node, model, mib, count in (
                ("gpu-11", "NVIDIA A100-SXM4-40GB", 40536, 4),
                ("gpu-12", "NVIDIA A100-SXM4-40GB", 40536, 4),
                ("gpu-17", "Tesla T4", T4_MIB, 4),
                ("gpu-18", "Tesla T4", T4_MIB, 2),
                ("mig-01", "NVIDIA A100-SXM4-40GB", 40536, 2),
            )
            for index in range(count)
        }
        self._slices: dict[str, list[SliceTile]] = {name: [] for name in self._cards}
        self._programs: list[ProgramLine] = []

    def _card(self, node: str, index: int, model: str, mib: int) -> CardTile:
        units = mib // 1024
        return CardTile(
            f"{node}/{index}",
            node,
            index,
            f"GPU-{node}-{index}",
            model,
            mib,
            units,
            units,
            True,
            0,
            temperature_c=38 + 5 * index,
            power_w=61.0 + 30 * index,
            power_limit_w=70.0 if mib == T4_MIB else 400.0,
        )

    def _run(self, run: "_Run") -> None:
        used = round(run.mib * run.fraction)
        for card in run.cards:
            start = sum(tile.held_mib for tile in self._slices[card]) // 5_000 if run.profile else 0
            self._slices[card].append(
                SliceTile(
                    *(run.name, run.name, run.user, run.mib, used, run.compute, "hard"),
                    run.busy,
                    run.profile,
                    start,
                )
            )
        count = len(run.cards)
        self._programs.append(
            ProgramLine(
                *(run.name, run.name, run.user, run.kind, "running"),
                run.profile or f"{count} × {run.mib // 1024}",
                self._at - run.age,
                started_at=self._at - run.age + 4,
                group=run.group,
                cards=run.cards,
                held_mib=run.mib * count,
                used_mib=used * count,
                busy=run.busy * count,
                compute=run.compute,
                idle_s=run.idle,
                violations=run.violations,
                starts=["gang-a"] if run.idle else [],
            )
        )

    def world(self) -> World:
        """Return all of it."""
        for run in _RUNS:
            self._run(run)
        cards = [self._filled(card) for card in self._cards.values()]
        return World(
            self._at,
            "cluster",
            "kube-lab",
            __version__,
            False,
            1024,
            cards,
            [*self._programs, *self._pending()],
            self._waiting(),
            7,
            workloads=self._workloads(),
            people=self._people(),
            nodes=self._nodes(cards),
            free_mib=sum(card.memory_mib - card.held_mib for card in cards if card.healthy),
            largest_mib=20480,
            programs_total=len(self._programs),
            currency="USD",
        )

    def _filled(self, card: CardTile) -> CardTile:
        tiles = self._slices[card.id]
        held = sum(tile.held_mib for tile in tiles)
        used = sum(tile.used_mib or 0 for tile in tiles)
        busy = min(1.0, sum(tile.busy or 0 for tile in tiles))
        lost = card.id == "gpu-17/3"
        return CardTile(
            card.id,
            card.node,
            card.index,
            card.uuid,
            card.model,
            card.memory_mib,
            card.units,
            card.units - math.ceil(held / (card.memory_mib / card.units)),
            not lost,
            held,
            None if lost else used,
            None if lost or card.node == "mig-01" else busy,
            None if lost else card.temperature_c,
            None if lost else card.power_w,
            card.power_limit_w,
            note="cordoned: kubectl uncordon gpu-18" if card.node == "gpu-18" else "",
            xids=["XID 79: the card has fallen off the bus"] if lost else [],
            readable="the driver does not find this card" if lost else "",
            slices=tiles,
        )

    def _waiting(self) -> list[WaitingLine]:
        rows: tuple[tuple[str, str, str, int, int, list[str], str], ...] = (
            ("gang-a", "vision", "4 × 40", 10, 2_700, ["gpu-11/0", "gpu-11/1", "gpu-11/2",
             "gpu-11/3"], "no GPU fits: 8 of 16 have too little memory, 5 are of another model, "
             "2 are divided into instances, 1 is unhealthy"),
            ("gang-b", "vision", "4 × 40", 10, 2_700, [], "waits for gang-a, which is of its gang"),
            ("sweep-16", "nlp", "12", 0, 1_500, ["gpu-17/2"], "no GPU fits: 14 of 16 have too "
             "little memory, 1 is reserved for requests before it, 1 is unhealthy"),
            ("eval-3", "nlp", "20", 0, 900, [],
             "no GPU fits: 15 of 16 have too little memory, 1 is unhealthy"),
            ("notebook-ida", "default", "16", 0, 240, [], "no GPU fits: 13 of 16 have too little memory, "
             "2 are cordoned, 1 is unhealthy"),
            ("mig-train", "search", "7g.40gb", 0, 95, [], "no GPU fits: 2 of 16 have no such instance, "
             "14 without instances"),
            ("tune-9", "assist", "30", -5, 31, [], "no GPU fits: 15 of 16 have too little memory, "
             "1 is unhealthy"),
        )  # fmt: skip
        return [
            WaitingLine(
                name,
                position,
                name,
                user,
                asks,
                priority,
                self._at - age,
                reserved,
                self._at + 4_800 if reserved else None,
                why,
                ["the end of resnet starts it"] if position < 3 else [],
            )
            for position, (name, user, asks, priority, age, reserved, why) in enumerate(rows, 1)
        ]

    def _pending(self) -> list[ProgramLine]:
        return [
            ProgramLine(
                row.id, row.name, row.user, "run", "waiting", row.asks, row.since,
                group="gang" if row.name.startswith("gang") else "",
            )
            for row in self._waiting()
        ]  # fmt: skip

    def _workloads(self) -> list[WorkloadLine]:
        loss = [
            (step * 500, 6.1 * math.exp(-step / 9) + 1.3 + 0.07 * math.sin(step))
            for step in range(40)
        ]
        return [
            WorkloadLine("resnet", "vision", "training", "running", self._at - 52_000, loss=loss,
                         programs=[f"resnet-worker-{index}" for index in range(4)]),
            WorkloadLine("bert-finetune", "nlp", "training", "running", self._at - 5_400,
                         loss=[(step * 100, 2.4 / (1 + step / 4)) for step in range(25)],
                         programs=["bert-finetune"]),
            WorkloadLine("gang", "vision", "training", "waiting", self._at - 2_700,
                         why=self._waiting()[0].why, programs=["gang-a", "gang-b"]),
            WorkloadLine("chat", "assist", "service", "running", self._at - 90_000, version="v2",
                         address="http://chat.assist.example.org", ready=3, desired=5,
                         requests_per_s=212.4, waiting_requests=37,
                         programs=[f"chat-v2-{index}" for index in range(3)]),
            WorkloadLine("embed", "search", "service", "running", self._at - 400_000, version="v1",
                         ready=1, desired=1, requests_per_s=38.0, waiting_requests=0,
                         programs=["embed-v1-0"]),
            WorkloadLine("tf-notebook", "default", "notebook", "running", self._at - 9_000,
                         address="http://notebook.default.example.org",
                         programs=["tf-notebook-7cf4575d78-9gxzd"]),
        ]  # fmt: skip

    def _people(self) -> list[PersonLine]:
        people = []
        for user in sorted({program.user for program in self._programs}):
            held = [program for program in self._programs if program.user == user]
            waits = [row for row in self._waiting() if row.user == user]
            people.append(
                PersonLine(
                    user,
                    sum(program.held_mib for program in held),
                    sum(program.used_mib or 0 for program in held),
                    sum(program.busy or 0 for program in held),
                    len(waits),
                    min((row.since for row in waits), default=None),
                    sum(program.held_mib for program in held if program.idle_s),
                )
            )
        return people

    def _nodes(self, cards: list[CardTile]) -> list[NodeLine]:
        nodes = []
        for name in dict.fromkeys(card.node for card in cards):
            own = [card for card in cards if card.node == name]
            cordoned = name == "gpu-18"
            nodes.append(
                NodeLine(
                    name,
                    "cordoned" if cordoned else "ready",
                    own[0].model,
                    len(own),
                    sum(card.units for card in own),
                    sum(card.free_units for card in own if card.healthy),
                    1024,
                    "the next pass removes it: idle for 12 m" if cordoned else "",
                    0.526 if own[0].memory_mib == T4_MIB else 4.1,
                    self._at - (31 if name == "mig-01" else 2),
                )
            )
        return nodes


def thousand_nodes(
    at: float, nodes: int = 1000, cards: int = 8, seed: int = 7
) -> tuple[World, Fleet]:
    """Return a large cluster. seed: of who is busy, so that a later look differs a little."""
    steady, lively = random.Random(3), random.Random(seed)
    names = [f"gpu-{number:04}" for number in range(nodes)]
    data = bytearray()
    lines = []
    for number, name in enumerate(names):
        load = 0.5 + 0.45 * math.sin(number / 61)
        free = 0
        cordoned = number % 97 == 5
        for _ in range(cards):
            held = min(254, max(0, round(254 * (load + steady.uniform(-0.5, 0.5)))))
            level = steady.choice((0.0, 0.2, 0.6, 0.9, 1.0)) + lively.uniform(-0.04, 0.04)
            busy = round(254 * min(1.0, max(0.0, level))) if held else 0
            lost = steady.random() < 0.002
            idle = held > 0 and level <= 0.01
            hot = steady.random() < 0.01
            flags = LOST * lost | CORDONED * cordoned | IDLE * idle | HOT * hot
            data += bytes((held, 255 if lost else busy, flags))
            free += 0 if lost or cordoned else round((254 - held) / 254 * 79)
        state = "cordoned" if cordoned else "ready"
        note = "cordoned: kubectl uncordon " + name if cordoned else ""
        model = "NVIDIA H100 80GB HBM3" if number % 3 else "NVIDIA A100-SXM4-80GB"
        lines.append(
            NodeLine(
                name, state, model, cards, 79 * cards, free, 1024, note, seen_at=at - number % 15
            )
        )
    world = World(
        at, "cluster", "kube-large", __version__, False, 1024, [], [], [], 0, nodes=lines,
        free_mib=sum(line.free_units for line in lines) * 1024, largest_mib=79 * 1024,
    )  # fmt: skip
    return world, Fleet(at, names, [cards] * nodes, bytes(data))


def node_cards(world: World, node: str) -> list[CardTile]:
    """Return the cards of one node of a large cluster, as they are sent when somebody looks at it."""
    line = next(line for line in world.nodes if line.name == node)
    tile = SliceTile("", "other", "other", 40 * 1024, 35_000, busy=0.9)
    return [
        CardTile(
            f"{node}/{index}", node, index, f"GPU-{node}-{index}", line.model, 81_559, 79, 39, True,
            tile.held_mib, tile.used_mib, 0.9, 61, 412.0, 700.0, note=line.note, slices=[tile],
        )
        for index in range(line.cards)
    ]  # fmt: skip


def sums(world: World) -> Sums:
    """Return what this world's users had this month and today: the first one most."""
    if world.place == "workstation" and not world.people:
        return Sums(problem="nothing is recorded yet")

    def lines(hours: float) -> list[UsageLine]:
        people = sorted(world.people, key=lambda line: -line.held_mib)
        held = []
        for number, line in enumerate(people):
            share = hours / (number + 2)
            used = 0.86 - 0.07 * number
            cost = round(share * 0.35, 2)
            held.append(UsageLine("held", line.user, share, share * 14.7, used, cost))
        return [
            *held,
            UsageLine("idle", "", hours / 3, 0.0, None, round(hours / 3 * 0.35, 2)),
            UsageLine("unobserved", "", hours / 40, 0.0, None, round(hours / 40 * 0.35, 2)),
        ]

    waits = WaitSums(12, 5, 190.0, 1230.0)
    return Sums(lines(310.0), lines(11.0), "EUR", world.at - 40 * 86_400, waits)


def timeline(at: float, span_s: int, shown: ProgramLine | CardTile | None) -> HistoryAnswer:
    """Return a history in 240 steps with a gap, which ends with what a program or a card has now."""
    step = span_s / 240
    start = at - span_s

    def series(
        name: str,
        unit: str,
        figure: Callable[[int], float],
        limit: float | None = None,
        most: float = math.inf,
    ) -> Series:
        mean = [None if 60 <= number < 66 else figure(number) for number in range(240)]
        most = most if limit is None else limit
        highest = [None if value is None else min(most, value * 1.04) for value in mean]
        return Series(
            name, unit, start, step, mean, highest, [] if limit is None else [limit] * 240
        )

    def wave(number: int) -> float:
        return 0.55 + 0.3 * math.sin(number / 17) + 0.08 * math.sin(number / 2.3)

    def wave_to(last: float) -> Callable[[int], float]:
        return lambda number: last * wave(number) / wave(239)

    def growing_to(last: float) -> Callable[[int], float]:
        return lambda number: last * min(1.0, 0.3 + number / 260)

    def from_90(last: float) -> Callable[[int], float]:
        return lambda number: last if number > 90 else 0.0

    if isinstance(shown, ProgramLine):
        limit = shown.compute / 100 or None
        busy = wave_to(shown.busy or 0.0)
        shares = [series("busy", "share", lambda number: min(limit or 1.0, busy(number)), limit)]
        if limit:
            throttled = series("throttled", "share", lambda number: max(0.0, wave(number) - 0.7))
            shares.append(throttled)
        memory = growing_to(shown.used_mib or 0)
        marks = [event for event in _changes(at) if event[0] >= start]
        return HistoryAnswer([series("memory", "MiB", memory, shown.held_mib), *shares], marks)
    tile = shown
    slices = tile.slices[:2] if tile else []
    parts = [
        (piece, grows(piece.used_mib or 0))
        for piece, grows in zip(slices, (growing_to, from_90), strict=False)
    ]
    rest = (tile.used_mib or 0) - sum(piece.used_mib or 0 for piece in slices) if tile else 0
    by_program = [series(piece.name, "MiB", memory, most=piece.held_mib) for piece, memory in parts]

    def memory_of_card(number: int) -> float:
        return rest + sum(memory(number) for _, memory in parts)

    return HistoryAnswer(
        [
            series("memory", "MiB", memory_of_card, tile.memory_mib if tile else 81_559),
            *by_program,
            series("busy", "share", wave_to((tile.busy if tile else None) or 0.0)),
            series("temperature", "celsius", lambda number: 38 + 14 * wave(number)),
            series("power", "watt", lambda number: 20 + 40 * wave(number), 70.0),
        ],
        [(start + 200 * step, "XID 31: a program accessed memory that is not its own")],
    )


def _changes(at: float) -> list[tuple[float, str]]:
    return [
        (at - 1500, "refused: 512 MiB beyond its slice"),
        (at - 900, "resized from 3 to 4"),
    ]


def detail(world: World, program: str) -> ProgramDetail | None:
    """Return a program in full; None if there is none."""
    line = next((line for line in world.programs if line.id == program), None)
    if line is None:
        return None
    row = next((row for row in world.waiting if row.id == program), None)
    if row:
        explanation = [
            f"{row.name} waits at position {row.position} of {world.waiting_total}.", row.why, *row.helps
        ]  # fmt: skip
    else:
        explanation = [f"{line.name} runs since {(world.at - line.requested_at) / 3600:.0f} h."]
    events = [(line.requested_at, f"asked for {line.asks}")]
    if line.started_at:
        events += [
            (line.started_at, f"granted {line.held_mib} MiB of card {', '.join(line.cards)}"),
            *_changes(world.at),
        ]
    mates = [other.id for other in world.programs if line.group and other.group == line.group]
    return ProgramDetail(
        line,
        row,
        explanation,
        events,
        refused=None if row else 1,
        throttled_s=184.0 if line.compute else None,
        logs=line.own,
        mates=[id_ for id_ in mates if id_ != line.id],
    )
