"""Answers to "what would help?" come true when it is done."""

import asyncio
import copy
from dataclasses import replace

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fenka.core.backfill import complete
from fenka.core.inventory import Card, DeviceId, Node
from fenka.core.request import Memory, Request
from fenka.views.board import WhatIf
from fenka.workstation.broker import Broker
from fenka.workstation.job import Job, JobGang
from fenka.workstation.screens.what_if import (
    Helps,
    InvalidQuestion,
    Outlook,
    Rehearsals,
    look_ahead,
)
from tests.builders import job

NOW = 1000.0


def card(index: int, model: str = "Tesla T4", memory_mib: int = 15079) -> Card:
    """A healthy card."""
    return Card(index, DeviceId(f"GPU-{index}"), model, memory_mib)


def members(name: str, request: Request, size: int, at: float, **fields: object) -> list[Job]:
    """A job, or the members of a gang."""
    first = job(name, request=request, requested_at=at, **fields)
    if size == 1:
        return [first]
    gang = JobGang(name, name, size, pid=1, start_ticks=1)
    return [
        msgspec.structs.replace(
            first, id=f"{name}/{rank}", name=f"{name}/{rank}", gang=gang, rank=rank
        )
        for rank in range(size)
    ]


def units(amount: int, cards: int = 1) -> Request:
    """A request of units of 1 GiB."""
    return Request(memory=Memory(amount, 1024), cards=cards)


def broker_with(cards: list[Card], *amounts: int) -> Broker:
    """A broker with a job of each size: p0, p1 …, as far as they fit."""
    broker = Broker(Node("here", tuple(cards)), "binpack")
    for number, amount in enumerate(amounts):
        submit(broker, members(f"p{number}", units(amount), 1, number))
    return broker


def submit(broker: Broker, jobs: list[Job]) -> None:
    """Submit jobs, and confirm all grants."""
    broker.submit(jobs, NOW)
    confirm_all(broker)


def confirm_all(broker: Broker) -> None:
    """Confirm all grants."""
    for id_ in list(broker.jobs):
        broker.confirm(id_, NOW)


def end(broker: Broker, queue_ids: list[str]) -> Broker:
    """Return a copy of the broker in which these programs have ended, process by process."""
    later = copy.deepcopy(broker)
    for queue_id in queue_ids:
        for member in later.jobs_of(queue_id):
            later.on_exit(member.id, NOW)
    return later


def started(broker: Broker, queue_id: str) -> bool:
    """Return whether a job, or all members of a gang, were granted."""
    jobs = broker.jobs_of(queue_id)
    return bool(jobs) and all(member.state != "waiting" for member in jobs)


def test_smaller_size_and_end_and_card_help_when_all_is_held() -> None:
    """Three of four notebooks hold a T4, and two units are left."""
    broker = broker_with([card(0)], 4, 4, 4, 4)
    outlook, rehearsals = complete(look_ahead(broker, NOW)), Rehearsals(broker)
    assert rehearsals.sentences(outlook.helps["p3"]) == [
        "the end of p0, p1 or p2",
        "asking for at most 2 units",
        "one more Tesla T4",
    ]
    assert outlook.starts == {"p0": ["p3"], "p1": ["p3"], "p2": ["p3"]}


def test_ends_together_help_when_no_single_one_does() -> None:
    """A request for ten units needs two of three programs of four to end, and leaves the third."""
    broker = broker_with([card(0)], 4, 4, 4, 10)
    helps, rehearsals = complete(look_ahead(broker, NOW)).helps["p3"], Rehearsals(broker)
    assert helps == Helps([], ["p0", "p1"], 2, ["Tesla T4"])
    assert rehearsals.sentences(helps)[0] == "the end of p0 and p1"


def test_ends_together_help_only_if_nobody_gets_the_room_in_between() -> None:
    """The large request is first, and cannot start before p0, p1 and p2 have ended.

    But when p1 has ended, the small one behind it starts: by its limit of 60 s it ends when p2 does.
    """
    broker = Broker(Node("here", (card(0),)), "binpack")
    for number, (amount, limit_s) in enumerate(
        [(3, 60.0), (3, None), (2, 60.0), (14, 60.0), (9, 60.0)]
    ):
        (one,) = members(f"p{number}", units(amount), 1, number)
        one.spec = msgspec.structs.replace(one.spec, time_limit_s=limit_s)
        submit(broker, [one])
    assert started(end(broker, ["p0", "p1", "p2"]), "p4")
    assert not started(end(broker, ["p0", "p1", "p2"]), "p3")
    assert complete(look_ahead(broker, NOW)).helps["p3"].together == ()


async def test_outlook_is_new_when_the_queue_was_served_again() -> None:
    """What helped before an end is not repeated after it."""
    broker = broker_with([card(0)], 4, 4, 4, 4)
    rehearsals = Rehearsals(broker)
    assert not rehearsals.outlook.helps
    assert await rehearsals.look()
    assert rehearsals.outlook == complete(look_ahead(broker, NOW))
    assert not await rehearsals.look()
    broker.on_exit("p1", NOW)
    assert not rehearsals.outlook.helps
    assert await rehearsals.look()
    assert rehearsals.outlook == Outlook()


async def test_look_is_given_up_when_the_queue_changes_meanwhile() -> None:
    """Rehearsals of two states are never mixed."""
    broker = broker_with([card(0)], 4, 4, 4, 4)
    rehearsals = Rehearsals(broker)
    looking = asyncio.create_task(rehearsals.look())
    await asyncio.sleep(0)
    assert not await rehearsals.look()  # One at a time.
    broker.on_exit("p1", NOW)
    assert not await looking
    assert not rehearsals.outlook.helps


async def test_one_request_is_explained_when_it_is_asked_for() -> None:
    """The last of many is looked at alone."""
    broker = broker_with([card(0)], 7, 7, *([7] * 30))
    rehearsals = Rehearsals(broker)
    assert await rehearsals.helps("p0") == []
    assert await rehearsals.helps("unknown") == []
    assert await rehearsals.helps("p31") == [
        "nothing alone: 29 requests wait before it, and `fenka why p2` says what helps the first"
    ]
    assert await rehearsals.helps("p2") == ["the end of p0 or p1", "one more Tesla T4"]


def test_two_more_cards_start_two_when_the_answer_says_so() -> None:
    """A machine with two more cards starts what the answer names, and leaves waiting what it leaves."""
    before = broker_with([card(0)], 14, 14, 14, 14)
    answer = Rehearsals(before).answer(WhatIf(add={"Tesla T4": 2}), NOW)
    after = broker_with([card(0), card(1), card(2)], 14, 14, 14, 14)
    assert answer.starts == [name for name in ("p1", "p2", "p3") if started(after, name)]
    assert answer.starts == ["p1", "p2"]
    assert answer.waits == [("p3", after.reason(after.jobs["p3"]))]
    assert answer.sentence == "2 of 3 start: p1, p2. p3: no GPU fits: 3 of 3 have too little memory"


def test_answer_counts_a_model_that_is_not_here_yet() -> None:
    """A request for an A100 starts when one is added, by the name that drivers or people give it."""
    broker = broker_with([card(0)], 4)
    request = Request(memory=Memory(4, 1024), models=frozenset(["NVIDIA A100-SXM4-80GB"]))
    broker._enqueue(members("a", request, 1, 9))  # as after the card was taken out
    for name in ("A100-80G", "nvidia a100-sxm4-80gb"):
        assert Rehearsals(broker).answer(WhatIf(add={name: 1}), NOW).starts == ["a"]


@pytest.mark.parametrize(
    ("question", "sentence"),
    [
        (WhatIf(end=["gone"]), "no program has the id gone: it has ended"),
        (WhatIf(add={"T5": 1}), "no model is called T5: did you mean T4"),
        (WhatIf(add={"T4": -1}), "a question adds 0 to 64 cards"),
        (WhatIf(add={"T4": 64, "A10": 1}), "a question adds 0 to 64 cards"),
    ],
)
def test_question_is_refused_when_it_names_nothing(question: WhatIf, sentence: str) -> None:
    """One sentence says what is wrong."""
    with pytest.raises(InvalidQuestion, match=sentence):
        Rehearsals(broker_with([card(0)], 4)).answer(question, NOW)


@st.composite
def worlds(draw: st.DrawFn) -> Broker:
    """A machine after a random day: some programs run, some wait, some have ended."""
    models = {"Tesla T4": 15079, "NVIDIA A10": 23028}
    cards = [
        card(index, model, models[model])
        for index, model in enumerate(
            draw(st.lists(st.sampled_from(sorted(models)), min_size=1, max_size=3))
        )
    ]
    broker = Broker(Node("here", tuple(cards)), draw(st.sampled_from(["binpack", "spread"])))
    for number in range(draw(st.integers(1, 12))):
        request = Request(
            memory=Memory(draw(st.integers(1, 14)), 1024),
            compute=draw(st.sampled_from([0, 0, 30, 100])),
            cards=draw(st.integers(1, len(cards))),
        )
        jobs = members(
            f"p{number}",
            request,
            draw(st.sampled_from([1, 1, 1, 2])),
            float(number),
            uid=draw(st.integers(1, 3)),
        )
        spec = msgspec.structs.replace(
            jobs[0].spec,
            priority=draw(st.sampled_from([0, 0, 1])),
            time_limit_s=draw(st.sampled_from([None, None, 60.0])),
        )
        for member in jobs:
            member.spec = spec
        submit(broker, jobs)
        running = sorted({member.queue_id for member in broker.placed()})
        if running and draw(st.integers(0, 3)) == 0:
            for member in broker.jobs_of(draw(st.sampled_from(running))):
                broker.on_exit(member.id, NOW)
            confirm_all(broker)
    return broker


@settings(max_examples=40)
@given(worlds())
def test_request_starts_when_what_helps_is_done(broker: Broker) -> None:
    """In random worlds each change that is named starts the request, and the rehearsal changes nothing."""
    before = copy.deepcopy(broker.ledger.entries), broker.pending
    outlook = complete(look_ahead(broker, NOW))
    assert (broker.ledger.entries, broker.pending) == before
    for waiting, helps in outlook.helps.items():
        for queue_id in helps.ends:
            assert started(end(broker, [queue_id]), waiting), (waiting, queue_id)
        if helps.together:
            assert started(end(broker, list(helps.together)), waiting), (waiting, helps)
        for model in helps.models:
            grown = copy.deepcopy(broker)
            like = next(other for other in broker.node.cards if other.model == model)
            further = replace(like, index=9, uuid=DeviceId("GPU-9"))
            grown.update_node(replace(grown.node, cards=(*grown.node.cards, further)), NOW)
            assert started(grown, waiting), (waiting, model)
    for queue_id, starts in outlook.starts.items():
        for waiting in starts:
            assert started(end(broker, [queue_id]), waiting), (waiting, queue_id)
