"""Who pays for a container of root's engine: tickets, annotations, and the daemon's option."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from fenka.hardware.peer_credentials import PeerProcess, user_name
from fenka.jobs.job_spec import JobSpec
from fenka.workstation.accepting import Caller
from fenka.workstation.containers.container_request import (
    DeviceRequest,
    Engine,
    InvalidContainer,
)
from fenka.workstation.containers.hook_server import payer
from fenka.workstation.containers.tickets import MAX_CONTAINERS, MAX_PER_USER, TTL_S, Tickets
from fenka.workstation.main import InvalidOption, check_charge
from fenka.workstation.protocol import CreateTicket

ALICE, BOB = 1000, 1001


class Clock:
    """A clock that stands still."""

    now = 1000.0

    def __call__(self) -> float:
        """Return the time in seconds."""
        return self.now


@pytest.fixture
def clock() -> Clock:
    """A clock."""
    return Clock()


@pytest.fixture
def tickets(tmp_path: Path, clock: Clock) -> Tickets:
    """No tickets."""
    return Tickets(tmp_path / "tickets.json", clock)


def test_ticket_is_its_first_container_s_for_ever(
    tickets: Tickets, clock: Clock, tmp_path: Path
) -> None:
    """A restarted container shows it again, also to the next daemon and long after."""
    ticket = tickets.make(ALICE)
    clock.now += TTL_S
    assert tickets.use(ticket, "c1") == ALICE
    clock.now += 100 * TTL_S
    assert Tickets(tmp_path / "tickets.json", clock).use(ticket, "c1") == ALICE
    with pytest.raises(InvalidContainer, match="another container's"):
        tickets.use(ticket, "c2")


def test_ticket_expires_unless_it_is_used(tickets: Tickets, clock: Clock) -> None:
    """What an engine or a shell's history has kept of it is worthless after ten minutes."""
    ticket = tickets.make(ALICE)
    clock.now += TTL_S + 1
    with pytest.raises(InvalidContainer, match="unknown or older than 10 minutes"):
        tickets.use(ticket, "c1")


def test_projects_ticket_takes_containers_for_ten_minutes_and_again(
    tickets: Tickets, clock: Clock
) -> None:
    """Its command opens it again, so that Compose sees the same environment."""
    ticket = tickets.answer(ALICE, CreateTicket(project=True))
    assert [tickets.use(ticket, name) for name in ("c1", "c2")] == [ALICE, ALICE]
    clock.now += TTL_S + 1
    assert tickets.use(ticket, "c2") == ALICE
    with pytest.raises(InvalidContainer, match="another container's"):
        tickets.use(ticket, "c3")
    assert tickets.answer(ALICE, CreateTicket(project=True, former=ticket)) == ticket
    assert [tickets.use(ticket, name) for name in ("c3", "c1")] == [ALICE, ALICE]


def test_projects_ticket_expires_unless_it_is_used(tickets: Tickets, clock: Clock) -> None:
    """As any other."""
    ticket = tickets.answer(ALICE, CreateTicket(project=True))
    clock.now += TTL_S + 1
    with pytest.raises(InvalidContainer, match="older than 10 minutes"):
        tickets.use(ticket, "c1")


@pytest.mark.parametrize("project", [True, False])
def test_ticket_is_opened_again_for_its_user_and_projects_only(
    tickets: Tickets, clock: Clock, project: bool
) -> None:
    """Who has read another's ticket gets a new one of his own."""
    ticket = tickets.answer(ALICE, CreateTicket(project=project))
    assert tickets.use(ticket, "c1") == ALICE
    clock.now += TTL_S + 1
    other = tickets.answer(BOB if project else ALICE, CreateTicket(project=True, former=ticket))
    assert other != ticket
    with pytest.raises(InvalidContainer):
        tickets.use(ticket, "c2")


def test_project_keeps_the_containers_that_started_last(tickets: Tickets) -> None:
    """Of more than MAX_CONTAINERS, those that nobody has started for the longest time go."""
    ticket = tickets.answer(ALICE, CreateTicket(project=True))
    for number in range(MAX_CONTAINERS):
        tickets.use(ticket, f"c{number}")
    tickets.use(ticket, "c0")
    tickets.use(ticket, "new")
    (record,) = tickets._load().values()
    assert len(record.containers) == MAX_CONTAINERS
    assert record.containers[-2:] == ["c0", "new"]
    assert "c1" not in record.containers


def test_unknown_ticket_is_refused(tickets: Tickets) -> None:
    """A guess is one of 2**128."""
    with pytest.raises(InvalidContainer, match="unknown"):
        tickets.use("guess", "c1")


def test_file_has_no_ticket_that_could_be_used(tickets: Tickets, tmp_path: Path) -> None:
    """It has digests."""
    ticket = tickets.make(ALICE)
    assert ticket not in (tmp_path / "tickets.json").read_text()


def test_damaged_file_is_replaced(tickets: Tickets, tmp_path: Path) -> None:
    """Containers then need new tickets; nothing else depends on it."""
    (tmp_path / "tickets.json").write_text("{")
    assert tickets.use(tickets.make(BOB), "c1") == BOB


def test_user_with_too_many_tickets_loses_the_oldest(tickets: Tickets, clock: Clock) -> None:
    """Others lose none."""
    other = tickets.make(BOB)
    made = []
    for _ in range(MAX_PER_USER + 2):
        clock.now += 0.5
        made.append(tickets.make(ALICE))
    for word in made[:2]:
        with pytest.raises(InvalidContainer):
            tickets.use(word, "c")
    assert (tickets.use(made[2], "c2"), tickets.use(other, "c1")) == (ALICE, BOB)


def request(user: str = "", engine: Engine = "docker", ticket: str = "") -> DeviceRequest:
    """Return a container's request that names these."""
    return DeviceRequest("c1", engine, JobSpec(priority=5), user=user, ticket=ticket)


def caller(uid: int) -> Caller:
    """Return a hook of this user."""
    return Caller(PeerProcess(1, uid, -1, 1), uid)


def payers(charge: str, tickets: Tickets) -> Callable[[Caller, DeviceRequest], int]:
    """Return `payer` for the user alone."""
    pays = payer(charge, tickets)
    return lambda hook, container: pays(hook, container)[0]


def test_rootless_container_is_paid_by_its_user(tickets: Tickets) -> None:
    """The kernel names the user; a ticket or another name changes nothing."""
    pays = payers("refuse", tickets)
    assert pays(caller(ALICE), request(ticket=tickets.make(BOB))) == ALICE
    assert pays(caller(ALICE), request(user_name(ALICE))) == ALICE
    with pytest.raises(InvalidContainer, match="only root's containers count for others"):
        pays(caller(ALICE), request("root"))


def test_roots_container_is_paid_by_ticket_then_annotation_then_option(tickets: Tickets) -> None:
    """A ticket is the surest of them."""
    me = user_name(os.geteuid())
    assert payers("root", tickets)(caller(0), request(me, ticket=tickets.make(BOB))) == BOB
    assert payers("refuse", tickets)(caller(0), request(me)) == os.geteuid()
    assert payers("root", tickets)(caller(0), request()) == 0
    assert payers(me, tickets)(caller(0), request()) == os.geteuid()
    with pytest.raises(InvalidContainer, match="nobody pays for this container"):
        payers("refuse", tickets)(caller(0), request())
    with pytest.raises(InvalidContainer, match="no user 'nobody-here'"):
        payers("root", tickets)(caller(0), request("nobody-here"))


def test_unknown_user_of_the_option_is_reported_at_the_daemons_start() -> None:
    """Not at each container's."""
    for name in ("root", "refuse", "annotation"):
        check_charge(name)
    with pytest.raises(InvalidOption, match="--charge nobody-here: there is no user 'nobody-here'"):
        check_charge("nobody-here")


def test_podmans_annotation_counts_only_if_the_option_says_so(tickets: Tickets) -> None:
    """Podman gives a container the annotations of its image."""
    me = user_name(os.geteuid())
    podmans = request(me, "podman")
    with pytest.raises(InvalidContainer, match="nobody pays"):
        payers("refuse", tickets)(caller(0), podmans)
    assert payers("annotation", tickets)(caller(0), podmans) == os.geteuid()
    priorities = {
        (charge, engine): payer(charge, tickets)(caller(0), request(engine=engine))[1].priority
        for charge in ("root", "annotation")
        for engine in ("podman", "docker")
    }
    assert priorities == {
        ("root", "podman"): 0,
        ("root", "docker"): 5,
        ("annotation", "podman"): 5,
        ("annotation", "docker"): 5,
    }
    assert payer("root", tickets)(caller(ALICE), request(engine="podman"))[1].priority == 5


def test_podmans_annotation_may_lower_the_priority(tickets: Tickets) -> None:
    """An image that does so harms nobody else."""
    podmans = DeviceRequest("c1", "podman", JobSpec(priority=-3))
    assert payer("root", tickets)(caller(0), podmans)[1].priority == -3
