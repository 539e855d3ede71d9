"""Whose a card is, where other users do what they can."""

import os
import socket
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from fenka.core.inventory import Card, DeviceId
from fenka.hardware import card_lock
from fenka.hardware.card_lock import CardLocked, acquire, locked_by_root
from fenka.hardware.peer_credentials import Peer
from tests.workstation.users import User, place, stranger, victim

__all__ = ["place", "stranger", "victim"]


@pytest.fixture(autouse=True)
def roots_place(place: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Move the directory of root's locks below a temporary one."""
    monkeypatch.setattr(card_lock, "LOCKS", place / "cards")
    return place / "cards"


@pytest.fixture
def card() -> Card:
    """Return a card that no other test has."""
    return Card(0, DeviceId(f"GPU-{uuid.uuid4()}"), "Tesla T4", 15079)


@pytest.fixture
def squatted(card: Card, stranger: User) -> Iterator[socket.socket]:
    """Have another user hold the card's name."""
    with stranger.serve(f"\0fenka/card/{card.uuid}") as name:
        yield name


@pytest.mark.usefixtures("squatted")
def test_root_acquires_a_card_whose_name_an_ordinary_user_holds(card: Card, stranger: User) -> None:
    """The callback gets the process that has the name."""
    displaced: list[Peer] = []
    with acquire([card], lambda _, owner: displaced.append(owner)), pytest.raises(CardLocked):
        acquire([card])
    assert [owner.uid for owner in displaced] == [stranger.uid]


def test_acquire_does_not_block_when_the_holder_accepts_no_connection(
    card: Card, squatted: socket.socket, victim: User
) -> None:
    """A full queue of connections counts as a holder."""
    squatted.listen(0)
    name = f"\0fenka/card/{card.uuid}"
    with socket.socket(socket.AF_UNIX) as first:
        first.connect(name)
        assert victim.do(lambda: can_own(card)) is False
        assert can_own(card) is True


def test_ordinary_user_is_rejected_while_root_has_the_card(
    card: Card, victim: User, roots_place: Path
) -> None:
    """What a killed owner leaves does not count."""
    with acquire([card]):
        assert victim.do(lambda: can_own(card)) is False
        assert victim.do(lambda: locked_by_root(card)) is True
        assert victim.do(lambda: _can_open(roots_place / f"{card.uuid}.lock")) is False
    assert list(roots_place.iterdir()) == []
    roots_place.joinpath(f"{card.uuid}.lock").write_text("1")
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(roots_place / card.uuid))
    assert victim.do(lambda: locked_by_root(card)) is False
    assert victim.do(lambda: can_own(card)) is True
    assert can_own(card) is True


def test_root_is_rejected_while_another_root_program_has_the_card(card: Card) -> None:
    """That program may see another /run."""
    with acquire([card]):
        with pytest.raises(CardLocked) as refused:
            acquire([card])
        owner = refused.value.owner
        assert owner
        assert owner.uid == 0
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(f"\0fenka/card/{card.uuid}")
        other.listen()
        with pytest.raises(CardLocked) as refused:
            acquire([card])
    acquire([card]).close()


def test_locked_by_root_is_true_when_root_takes_an_ordinary_users_card(
    card: Card, stranger: User
) -> None:
    """The ordinary user had the card first."""
    with stranger.serve(f"\0fenka/card/{card.uuid}"):
        assert stranger.do(lambda: locked_by_root(card)) is False
        with acquire([card]):
            assert stranger.do(lambda: locked_by_root(card)) is True
            assert locked_by_root(card) is False
        assert stranger.do(lambda: locked_by_root(card)) is False


def test_directory_is_not_used_when_another_user_owns_it(
    card: Card, stranger: User, roots_place: Path
) -> None:
    """Then the name alone decides."""
    stranger.mkdir(roots_place)
    with acquire([card]):
        assert list(roots_place.iterdir()) == []
        with pytest.raises(CardLocked):
            acquire([card])


def test_directory_is_not_used_when_others_may_replace_it(card: Card, roots_place: Path) -> None:
    """Its parent was made with an open umask."""
    roots_place.parent.chmod(0o777)
    with acquire([card]):
        assert not roots_place.exists()


def test_acquire_locks_all_cards_or_none_in_another_network(card: Card) -> None:
    """The error names the owner. Cards that were locked before it are unlocked."""
    network, free = (
        Path("/proc/self/ns/net"),
        Card(1, DeviceId(f"GPU-{uuid.uuid4()}"), "Tesla T4", 15079),
    )
    with acquire([card], network=network):
        owner = rf"card 0 .* is owned by process {os.getpid()} of user "
        with pytest.raises(CardLocked, match=owner):
            acquire([free, card], network=network)
        with socket.socket(socket.AF_UNIX) as daemon, pytest.raises(OSError, match="in use"):
            daemon.bind(f"\0fenka/card/{card.uuid}")
    acquire([free, card], network=network).close()


def can_own(card: Card) -> bool:
    """Return whether this process could lock the card."""
    try:
        acquire([card]).close()
    except CardLocked:
        return False
    return True


def _can_open(path: Path) -> bool:
    try:
        path.open().close()
    except PermissionError:
        return False
    return True
