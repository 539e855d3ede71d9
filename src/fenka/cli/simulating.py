"""`fenka sim card`: what can go wrong with a card, on the simulated node of the current runtime."""

from dataclasses import dataclass

from fenka.cli.errors import UserError
from fenka.core.errors import INVALID_INPUT
from fenka.hardware.simulated import SimulatedNode
from fenka.workstation import paths


@dataclass(frozen=True, slots=True)
class Wish:
    """The command's options as typed."""

    temperature: int | None
    no_temperature: bool
    xid: int | None
    ecc_errors: int | None
    corrected: bool
    lose: bool
    recover: bool


def simulate_card(card: str, wish: Wish) -> None:
    """Do what was asked, and say so."""
    _check(wish)
    directory = paths.current().simulated
    node = SimulatedNode(directory)
    if not node.running:
        raise UserError(
            f"no simulated node runs in {directory}: start one with "
            "`fenka daemon --background --simulate T4`"
        )
    index = node.find(card)
    for sentence in _provoke(node, index, wish):
        print(f"card {index}: {sentence}")


def _check(wish: Wish) -> None:
    if wish.temperature is not None and wish.no_temperature:
        raise UserError("--temperature and --no-temperature exclude each other", INVALID_INPUT)
    if wish.lose and wish.recover:
        raise UserError("--lose and --recover exclude each other", INVALID_INPUT)
    if wish.corrected and wish.ecc_errors is None:
        raise UserError("--corrected says what --ecc-errors counts: give that, too", INVALID_INPUT)
    for option, value, low, high in (
        ("--temperature", wish.temperature, 0, 200),
        ("--xid", wish.xid, 1, 65535),
        ("--ecc-errors", wish.ecc_errors, 1, 2**32 - 1),
    ):
        if value is not None and not low <= value <= high:
            raise UserError(f"{option} takes {low} to {high}, not {value}", INVALID_INPUT)
    if wish == Wish(None, False, None, None, False, False, False):
        raise UserError(
            "nothing to do: give --temperature, --no-temperature, --xid, --ecc-errors, --lose or "
            "--recover",
            INVALID_INPUT,
        )


def _provoke(node: SimulatedNode, index: int, wish: Wish) -> list[str]:
    """A sentence for each thing done. ECC first: it alone can be refused, and then nothing was done."""
    done = []
    if wish.ecc_errors is not None:
        node.add_ecc_errors(index, wish.ecc_errors, corrected=wish.corrected)
        kind = "corrected" if wish.corrected else "uncorrected"
        done.append(f"{wish.ecc_errors} more {kind} memory errors")
    if wish.temperature is not None:
        node.set_temperature(index, wish.temperature)
        done.append(f"says {wish.temperature} °C")
    if wish.no_temperature:
        node.set_temperature(index, None)
        done.append("says the temperature that its load gives")
    if wish.xid is not None:
        node.raise_xid(index, wish.xid)
        done.append(f"XID {wish.xid} reported")
    if wish.lose:
        node.lose(index)
        done.append("lost")
    if wish.recover:
        node.recover(index)
        done.append("recovered")
    return done
