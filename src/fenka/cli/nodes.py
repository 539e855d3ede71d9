"""`fenka node` and `fenka sim node`: the two programs of a cluster's GPU node."""

import logging
import signal
import socket
import uuid
from dataclasses import replace
from pathlib import Path

from fenka.hardware.simulated import SimulatedCard, SimulatedNode, parse_spec
from fenka.node import main
from fenka.node.main import Config


def node(config: Config) -> None:
    """Serve until told to stop."""
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(message)s")
    main.run(config)


def simulate(spec: str, directory: Path, name: str) -> None:
    """Have a card server until SIGTERM or SIGINT."""
    cards = _named(parse_spec(spec), name or socket.gethostname())
    simulated = SimulatedNode.create(directory, cards)
    simulated.start(idle_seconds=0)
    signals = {signal.SIGTERM, signal.SIGINT}
    # Now and not before: the card server would inherit it.
    signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    print(f"fenka sim node: {', '.join(card.name for card in cards)} in {directory}", flush=True)
    signal.sigwait(signals)
    simulated.stop()


def _named(cards: tuple[SimulatedCard, ...], node_name: str) -> tuple[SimulatedCard, ...]:
    """With UUIDs of this node: its directory, which they else come from, is the same on every node."""
    return tuple(
        replace(card, uuid=card.uuid or f"GPU-{uuid.uuid5(uuid.NAMESPACE_DNS, f'{node_name}:{n}')}")
        for n, card in enumerate(cards)
    )
