"""What cannot be enforced is not let in."""

import os
import shutil
import struct
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from fenka.isolation import account
from fenka.isolation.lease_control import layout
from tests.native.clients import CARDS, GIB, OUT_OF_MEMORY, SYSTEM_NOT_READY, Client, Lease, client

Make = Callable[..., Lease]
SAYS = "fenka: no GPU for this process: "


def patch(struct_name: str, field: str, format_: str, value: object) -> Callable[[Path], None]:
    """Overwrites one field of a file."""

    def change(path: Path) -> None:
        offset = layout().offsetof(struct_name, field)
        with path.open("r+b") as file:
            file.seek(offset)
            file.write(struct.pack(format_, value))

    return change


def page(field: str, format_: str, value: object) -> Callable[[Path], None]:
    """Overwrites one field of the control page."""
    return patch("struct fenka_control", field, format_, value)


def card(offset: int, format_: str, value: object) -> Callable[[Path], None]:
    """Overwrites bytes of the first card's limits."""

    def change(path: Path) -> None:
        start = layout().offsetof("struct fenka_control", "cards") + offset
        with path.open("r+b") as file:
            file.seek(start)
            file.write(struct.pack(format_, value))

    return change


def resized(bytes_: int) -> Callable[[Path], None]:
    """Cuts or stretches a file."""
    return lambda path: os.truncate(path, bytes_)


def replaced_by_directory(path: Path) -> None:
    """A directory where the file should be: what a container runtime makes of a missing mount."""
    path.unlink()
    path.mkdir()


BAD_CONTROLS: dict[str, tuple[Callable[[Path], None], str]] = {
    "missing": (Path.unlink, "does not exist"),
    "directory": (replaced_by_directory, "does not have the size of a control page"),
    "empty": (resized(0), "does not have the size of a control page"),
    "short": (resized(4095), "does not have the size of a control page"),
    "long": (resized(4097), "does not have the size of a control page"),
    "foreign": (page("magic", "<Q", 1), "is not a control page"),
    "newer": (page("version", "<I", 3), "is of a version that this library does not read"),
    "missized": (page("bytes", "<I", 8192), "states a size that is not its own"),
    "half written": (page("generation", "<Q", 3), "was left half written"),
    "no cards": (page("card_count", "<I", 0), "states an impossible number of cards"),
    "17 cards": (page("card_count", "<I", 17), "states an impossible number of cards"),
    "nameless card": (card(0, "<40s", b""), "names a card by something that is not a UUID"),
    "no memory": (card(48, "<Q", 0), "gives no memory on one of its cards"),
    "101 percent": (card(64, "<I", 101), "gives a share of compute that is not 1 to 100 percent"),
}

BAD_ACCOUNTS: dict[str, tuple[Callable[[Path], None], str]] = {
    "missing": (Path.unlink, "does not exist"),
    "directory": (replaced_by_directory, "cannot be written"),
    "short": (resized(4096), "does not have the size of an account"),
    "foreign": (patch("struct fenka_account", "magic", "<Q", 1), "is not an account"),
    "newer": (
        patch("struct fenka_account", "version", "<I", 9),
        "is of a version that this library does not write",
    ),
    "misnumbered": (
        patch("struct fenka_account", "slot_count", "<I", 64),
        "states a number of slots that is not its own",
    ),
}


def assert_shut(refused: Client, sentence: str) -> None:
    """No initialisation, no memory by any call, and one line that says why, once."""
    assert refused.ask("init").code == SYSTEM_NOT_READY
    assert refused.ask("init").code == SYSTEM_NOT_READY
    assert refused.ask("context").code == SYSTEM_NOT_READY
    assert refused.ask("retain").code == SYSTEM_NOT_READY
    assert refused.ask("block", GIB).code == SYSTEM_NOT_READY
    for what in ("alloc", "managed", "async", "pitch", "array", "mipmap", "graph", "info"):
        assert refused.ask(what, 1, 1).code != 0
    assert refused.finish() == f"{SAYS}{sentence}\n"


@pytest.mark.parametrize(("spoil", "says"), BAD_CONTROLS.values(), ids=BAD_CONTROLS)
def test_gpu_is_refused_when_the_control_page_is_invalid(
    lease: Lease, spoil: Callable[[Path], None], says: str
) -> None:
    """A page that is wrong in any way gives error 802 and one line."""
    spoil(lease.control)
    assert_shut(lease.start(), f"{lease.control} {says}")


@pytest.mark.parametrize(("spoil", "says"), BAD_ACCOUNTS.values(), ids=BAD_ACCOUNTS)
def test_gpu_is_refused_when_the_account_is_invalid(
    lease: Lease, spoil: Callable[[Path], None], says: str
) -> None:
    """So does an account that cannot be kept."""
    spoil(lease.account)
    assert_shut(lease.start(), f"{lease.account} {says}")


def test_gpu_is_refused_when_a_card_is_listed_twice(make_lease: Make) -> None:
    """Two limits for one card cannot both hold."""
    lease = make_lease(1, 2)
    card(120, "<40s", CARDS[0].encode())(lease.control)
    assert_shut(lease.start(), f"{lease.control} names a card twice")


def test_gpu_is_refused_when_there_is_no_lease(lease: Lease) -> None:
    """Preloaded, but without a lease: no GPU."""
    assert_shut(
        lease.start(FENKA_LEASE=""),
        "it holds no lease: /run/fenka/lease/control does not exist and FENKA_LEASE is not set",
    )


@pytest.mark.parametrize("there", ["", CARDS[1]])
def test_gpu_is_refused_when_the_driver_lacks_the_card(lease: Lease, there: str) -> None:
    """A lease of a card that is not in this machine is no lease."""
    refused = lease.start(FENKA_NULL_CARDS=there)
    assert refused.ask("init").code == SYSTEM_NOT_READY
    assert (
        refused.finish()
        == f"{SAYS}{CARDS[0]} is a card of the lease, but the driver does not know it\n"
    )


def test_gpu_is_refused_when_the_driver_lacks_the_second_card(make_lease: Make) -> None:
    """Half a lease is none."""
    refused = make_lease(1, 1).start(FENKA_NULL_CARDS=CARDS[0])
    assert refused.ask("init").code == SYSTEM_NOT_READY
    assert CARDS[1] in refused.finish()


def test_gpu_is_granted_when_the_lease_was_repaired(lease: Lease) -> None:
    """A program that tries again after the agent has written the page gets in."""
    written = lease.control.read_bytes()
    lease.control.unlink()
    waiting = lease.start()
    assert waiting.ask("init").code == SYSTEM_NOT_READY
    lease.control.write_bytes(written)
    waiting.enter()
    assert waiting.ask("alloc", 5 * GIB).code == OUT_OF_MEMORY
    assert waiting.ask("alloc", GIB).code == 0


def test_gpu_is_refused_when_no_slot_is_free(lease: Lease) -> None:
    """A process that cannot be counted does not run on the card."""
    # 1024 owners that nobody can judge: their namespace is unknown.
    start = layout().offsetof("struct fenka_account", "identity")
    with lease.account.open("r+b") as file:
        file.seek(start)
        file.write(b"".join(struct.pack("<Q", pid | 255 << 23) for pid in range(1, 1025)))
    assert_shut(lease.start(), f"{lease.account} has no free slot left")


def test_environment_cannot_select_another_lease(make_lease: Make, tmp_path: Path) -> None:
    """Where /run/fenka/lease/control exists, FENKA_LEASE is not heeded."""
    if subprocess.run(["unshare", "-rm", "true"], capture_output=True, check=False).returncode:
        pytest.skip("this machine allows no private mount namespace")
    given, wished = make_lease(1), make_lease(8)
    script = (
        "set -e; mount -t tmpfs none /run; mkdir /run/fenka;"
        f' mount --bind {given.folder} /run/fenka; exec env LD_PRELOAD="$SHIM" {client(0)}'
    )
    environment = wished.environment()
    environment["SHIM"] = environment.pop("LD_PRELOAD")
    wrapper = tmp_path / "isolated"
    wrapper.write_text(f"#!/bin/sh\nexec unshare -rm {shutil.which('sh')} -c '{script}'\n")
    wrapper.chmod(0o755)
    isolated = Client(wrapper, environment).enter()
    assert isolated.ask("total").value == GIB
    assert isolated.ask("alloc", 2 * GIB).code == OUT_OF_MEMORY
    assert isolated.ask("alloc", GIB).code == 0
    assert (given.held(), wished.held()) == (GIB, 0)
    assert account.read(wished.account).processes == ()
    isolated.kill()
