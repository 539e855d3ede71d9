"""Measure what one message of the dashboard costs: of a machine, and of 1,000 nodes on paper.

The baseline is the same message encoded for each of 20 viewers, instead of once for all. Viewers read over
loopback connections in this process, so their part is in the figures. Then the program is run, see
`program.py`.
"""

import asyncio
import contextlib
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import aiohttp
import msgspec

sys.path.insert(0, str(Path(__file__).parents[2]))

from bench.commands import machine
from bench.dashboard import program
from fenka.local.machine_board import Surroundings, Viewer, world
from fenka.views.cluster_board import NodePart, fleet
from fenka.workstation.protocol import MachineSnapshot
from tests.dashboard import machines

NODES, CARDS, ROUNDS, VIEWERS = 1000, 8, 50, 20
PERIOD_S, GOAL_PERCENT = 2.0, 5.0
"""Between messages of a cluster; of one core, with 20 viewers."""

encode = msgspec.json.Encoder().encode


def median_ms(work: Callable[[], object]) -> float:
    """Return the median of the processor time of a call, in milliseconds."""
    took = []
    for _ in range(ROUNDS):
        begun = time.process_time()
        work()
        took.append((time.process_time() - begun) * 1000)
    return statistics.median(took)


def paper_machine() -> MachineSnapshot:
    """A machine with 8 cards, 24 programs and 100 requests that wait."""
    running = [machines.program(f"p{number}", number % CARDS) for number in range(3 * CARDS)]
    waiting = [machines.program(f"w{number}", position=number + 1) for number in range(100)]
    cards = [machines.card(index, leased_mib=12924, free_mib=2155) for index in range(CARDS)]
    return machines.machine(*running, *waiting, cards=cards)


def paper_nodes() -> dict[str, NodePart]:
    """All nodes with their cards and three programs on each card."""
    shown = world(paper_machine(), Viewer(1000), Surroundings(), 5000.0)
    part = NodePart(shown.cards, shown.programs)
    return {f"gpu-{number}": part for number in range(NODES)}


async def sent_ms(data: bytes, viewers: int) -> float:
    """Return the processor time of one message from `publish` to its last viewer, in milliseconds."""
    async with machines.served(machines.machine()) as page, contextlib.AsyncExitStack() as opened:
        session = await opened.enter_async_context(
            aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))
        )
        url, headers = (
            f"http://127.0.0.1:{page.port}/api/live",
            {"Authorization": f"Bearer {machines.TOKEN}"},
        )
        streams = [
            await opened.enter_async_context(
                session.get(url, headers=headers, read_bufsize=1 << 22)
            )
            for _ in range(viewers)
        ]
        for stream in streams:
            await stream.content.readuntil(b"}\n\n")
        begun = time.process_time()
        for _ in range(ROUNDS):
            page.live.fanout.publish("world", data)
            await asyncio.gather(*(stream.content.readuntil(b"\n\n") for stream in streams))
        return (time.process_time() - begun) * 1000 / ROUNDS


def main() -> int:
    """Print a Markdown table. Return 1 if the goal is missed."""
    snapshot, nodes = paper_machine(), paper_nodes()
    one = world(snapshot, Viewer(1000), Surroundings(), 5000.0)
    many = fleet(nodes, 5000.0)
    data = encode(many)
    figures = {
        "8 cards: make": median_ms(lambda: world(snapshot, Viewer(1000), Surroundings(), 1.0)),
        "8 cards: encode": median_ms(lambda: encode(one)),
        "8 cards: encode for each of 20 viewers": median_ms(
            lambda: [encode(one) for _ in range(VIEWERS)]
        ),
        "8,000 cards: make": median_ms(lambda: fleet(nodes, 1.0)),
        "8,000 cards: encode": median_ms(lambda: encode(many)),
        "8,000 cards: send to 1 viewer": asyncio.run(sent_ms(data, 1)),
        "8,000 cards: send to 20 viewers": asyncio.run(sent_ms(data, VIEWERS)),
    }
    print(machine())
    print("| message | ms of processor time |\n|---|---|")
    for name, ms in figures.items():
        print(f"| {name} | {ms:.2f} |")
    print(f"\n8 cards: {len(encode(one)) / 1000:.1f} kB. 8,000 cards: {len(data) / 1000:.1f} kB.")
    print(
        "\n| program | start, s of the processor | MiB, 1 viewer | MiB, 20 viewers |\n|---|---|---|---|"
    )
    for name, costs in {
        "8 cards": program.of_machine(),
        "8,000 cards": program.of_cluster(),
    }.items():
        print(f"| {name} | {costs.start_s:.1f} | {costs.one_mib:.0f} | {costs.many_mib:.0f} |")
    parts = "make", "encode", "send to 20 viewers"
    percent = sum(figures[f"8,000 cards: {part}"] for part in parts) / PERIOD_S / 10
    print(f"8,000 cards, 20 viewers: {percent:.1f} % of a core, goal {GOAL_PERCENT:.0f} %.")
    return int(percent > GOAL_PERCENT)


if __name__ == "__main__":
    sys.exit(main())
