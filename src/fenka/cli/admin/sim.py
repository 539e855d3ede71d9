"""`fenka sim`: operates simulated cards and nodes."""

import signal
import socket
import uuid
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import typer

from fenka.cli.common_options import group, register
from fenka.cli.error_report import UserError
from fenka.core.errors import INVALID_INPUT
from fenka.hardware import host_tree
from fenka.hardware.card_spec import SimulatedCard, parse_spec
from fenka.hardware.simulated_node import SimulatedNode
from fenka.workstation import paths

app = group("Operate simulated cards and nodes.")


@dataclass(frozen=True, slots=True)
class CardChange:
    """A change of a simulated card."""

    temperature: Annotated[
        int | None,
        typer.Option(
            "--temperature", metavar="C", help="report this temperature, whatever the load"
        ),
    ] = None
    no_temperature: Annotated[
        bool, typer.Option("--no-temperature", help="report the temperature of the load again")
    ] = False
    xid: Annotated[
        int | None, typer.Option("--xid", metavar="N", help="report this error of the driver")
    ] = None
    ecc_errors: Annotated[
        int | None,
        typer.Option("--ecc-errors", metavar="N", help="count uncorrected memory errors"),
    ] = None
    corrected: Annotated[
        bool, typer.Option("--corrected", help="with --ecc-errors: count corrected errors")
    ] = False
    lose: Annotated[bool, typer.Option("--lose", help="the card falls off the bus")] = False
    recover: Annotated[
        bool,
        typer.Option("--recover", help="reset: a lost card comes back, pending MIG is switched"),
    ] = False
    mig_pending: Annotated[
        bool | None,
        typer.Option(
            "--mig-pending/--no-mig-pending", help="switches of MIG stay pending until --recover"
        ),
    ] = None
    mig_failures: Annotated[
        int | None,
        typer.Option("--mig-failures", metavar="N", help="the next N creations of instances fail"),
    ] = None


def card(
    card: Annotated[str, typer.Argument(help="index or UUID")],
    changes: CardChange,
) -> None:
    """Provoke faults and readings of a card of this machine's daemon."""
    _check(changes)
    directory = paths.current().simulated
    node = SimulatedNode(directory)
    if not node.running:
        raise UserError(
            f"no simulated node runs in {directory}: start one with "
            "`fenka daemon --background --simulate T4`"
        )
    index = node.find(card)
    for sentence in _provoke(node, index, changes):
        print(f"card {index}: {sentence}")


def _check(changes: CardChange) -> None:
    if changes.temperature is not None and changes.no_temperature:
        raise UserError("--temperature and --no-temperature exclude each other", INVALID_INPUT)
    if changes.lose and changes.recover:
        raise UserError("--lose and --recover exclude each other", INVALID_INPUT)
    if changes.corrected and changes.ecc_errors is None:
        raise UserError("--corrected requires --ecc-errors", INVALID_INPUT)
    for option, value, low, high in (
        ("--temperature", changes.temperature, 0, 200),
        ("--xid", changes.xid, 1, 65535),
        ("--ecc-errors", changes.ecc_errors, 1, 2**32 - 1),
        ("--mig-failures", changes.mig_failures, 0, 65535),
    ):
        if value is not None and not low <= value <= high:
            raise UserError(f"{option} takes {low} to {high}, not {value}", INVALID_INPUT)
    if changes == CardChange():
        raise UserError(
            "nothing to do: give --temperature, --no-temperature, --xid, --ecc-errors, --lose, "
            "--recover, --mig-pending or --mig-failures",
            INVALID_INPUT,
        )


def _provoke(node: SimulatedNode, index: int, changes: CardChange) -> list[str]:
    """Apply the changes; return one sentence for each. ECC comes first, because only it can be refused."""
    done = []
    if changes.ecc_errors is not None:
        node.add_ecc_errors(index, changes.ecc_errors, corrected=changes.corrected)
        kind = "corrected" if changes.corrected else "uncorrected"
        done.append(f"{changes.ecc_errors} more {kind} memory errors")
    if changes.temperature is not None:
        node.set_temperature(index, changes.temperature)
        done.append(f"reports {changes.temperature} °C")
    if changes.no_temperature:
        node.set_temperature(index, None)
        done.append("reports the temperature of its load")
    if changes.xid is not None:
        node.raise_xid(index, changes.xid)
        done.append(f"XID {changes.xid} reported")
    if changes.mig_pending is not None:
        node.set_mig_pending(index, pending=changes.mig_pending)
        done.append(
            "MIG switches when it is recovered" if changes.mig_pending else "MIG switches at once"
        )
    if changes.mig_failures is not None:
        node.fail_mig(index, changes.mig_failures)
        done.append(f"the next {changes.mig_failures} creations of instances fail")
    if changes.lose:
        node.lose(index)
        done.append("lost")
    if changes.recover:
        node.recover(index)
        done.append("recovered")
    return done


def stop() -> None:
    """End the card server of this user's simulated cards. Its programs lose their cards."""
    runtime = paths.current()
    if runtime.answers():
        raise UserError("the fenka daemon uses it: `fenka daemon --stop` ends both")
    node = SimulatedNode(runtime.simulated)
    if not node.running:
        raise UserError(f"no simulated node runs in {runtime.simulated}")
    node.stop()
    print("the card server has ended")


def node(
    spec: Annotated[str, typer.Argument(help="T4, 'V100-16G*2', FILE.toml")],
    directory: Annotated[Path, typer.Option(help="where programs find the cards")] = Path(
        "/run/fenka/simulated"
    ),
    name: Annotated[
        str,
        typer.Option(
            "--name",
            envvar="NODE_NAME",
            help="the cards' UUIDs derive from it; default: the host's",
        ),
    ] = "",
    tree: Annotated[
        Path | None,
        typer.Option(
            "--host-tree", metavar="DIR", help="write what drivers have in /proc, /sys, /dev"
        ),
    ] = None,
) -> None:
    """Run a card server until SIGTERM or SIGINT."""
    cards = _with_uuids(parse_spec(spec), name or socket.gethostname())
    if tree is not None:
        host_tree.write(tree, directory, cards)
    simulated = SimulatedNode.create(directory, cards)
    simulated.start(idle_seconds=0)
    signals = {signal.SIGTERM, signal.SIGINT}
    # Only now: the card server would inherit the blocked signals.
    signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    print(f"fenka sim node: {', '.join(card.name for card in cards)} in {directory}", flush=True)
    signal.sigwait(signals)
    simulated.stop()


def _with_uuids(cards: tuple[SimulatedCard, ...], node_name: str) -> tuple[SimulatedCard, ...]:
    """Derive UUIDs from the node's name: the default source, the directory, is the same on all nodes."""
    return tuple(
        replace(card, uuid=card.uuid or f"GPU-{uuid.uuid5(uuid.NAMESPACE_DNS, f'{node_name}:{n}')}")
        for n, card in enumerate(cards)
    )


register(app, card, "Provoke faults and readings of a simulated card.")
register(app, stop, "End the card server of simulated cards that no daemon uses.")
register(app, node, "Serve a node's simulated cards.", hidden=True)
