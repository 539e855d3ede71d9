"""Tests the life of orders: each transition, and whatever happens in whatever order."""

from collections import Counter
from typing import Any

import msgspec
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from fenka.autoscaler.orders import (
    GONE_S,
    MAX_WHY,
    OVER,
    advance,
    answered,
    launchable,
    listed_missing,
    order_of_token,
    refused,
    token,
)
from fenka.autoscaler.snapshot import Snapshot
from fenka.cloud.port import (
    Denied,
    OutOfStock,
    ProviderError,
    Quota,
    TooDear,
    Unknown,
)
from fenka.cluster.autoscaling import ORDER, OrderRecord, Slot
from tests.autoscaler.snapshots import NOW, config, elastic_node, instance, offer, snapshot
from tests.builders import T4_MIB, Json, pod_json

TIMEOUT_S = 900.0


def order(*slots: Slot, **fields: Any) -> OrderRecord:
    """An order of offer t4, which was just written."""
    known = {"group": "t4", "type": "t4.x", "zone": "a", "capacity": "on-demand", "price": 4.0}
    fields = {"state": "written", "written_at": NOW, **fields}
    return OrderRecord(**{**known, "slots": slots or (Slot(),), **fields})


def the_slot(record: OrderRecord | None) -> Slot:
    """Its only slot."""
    assert record is not None
    (slot,) = record.slots
    return slot


def advanced(record: OrderRecord, **fields: Any) -> OrderRecord:
    """The order `t4-1` after a pass."""
    found = advance(snapshot(orders={"t4-1": record}, **fields)).orders.get("t4-1", record)
    assert found is not None
    return found


# ---- transitions ----


@pytest.mark.parametrize(
    ("ids", "states"),
    [
        ((), ["asked", "asked"]),
        (("i-1",), ["known", "asked"]),
        (("i-1", "i-2"), ["known", "known"]),
    ],
)
def test_answer_says_which_instances_are_known(ids: tuple[str, ...], states: list[str]) -> None:
    """Some clouds say so later."""
    found = answered(order(Slot(), Slot()), ids, NOW)
    assert [slot.state for slot in found.slots] == states
    assert found.state == min(states, key=["asked", "known"].index)
    assert found.asked_at == NOW


@pytest.mark.parametrize(
    ("error", "failure"),
    [
        (OutOfStock(offer().key), "out of stock"),
        (TooDear(offer().key, 5, 4), "too dear"),
        (Quota("t4"), "quota"),
        (Denied("the account may not do this"), "denied"),
    ],
)
def test_order_fails_when_the_answer_is_a_definite_no(error: ProviderError, failure: str) -> None:
    """Its offer is backed off, and its pods are planned anew."""
    found = refused(order(), error, NOW)
    assert (found.state, found.failure, found.why) == ("failed", failure, str(error))
    # It is remembered for hours, and all orders share one ConfigMap.
    assert found.slots == ()


def test_sentence_of_a_refusal_is_cut_when_it_is_long() -> None:
    """All orders share one ConfigMap."""
    assert len(refused(order(), Denied("no " * 1000), NOW).why) == MAX_WHY


def test_instance_is_kept_when_its_order_is_refused_at_last() -> None:
    """The first answer was lost: a part came, and the repeated call finds no more."""
    part = order(Slot(state="known", instance="i-1"), Slot())
    failed = refused(part, OutOfStock(offer().key), NOW)
    found = advanced(failed, instances=(instance(order="demo-t4-1-0"),))
    assert (the_slot(found).instance, the_slot(found).state) == ("i-1", "known")


def test_order_is_as_it_was_when_the_answer_is_lost() -> None:
    """The same token again."""
    assert refused(order(), Unknown("no answer"), NOW) == order()


def test_token_names_cluster_order_and_attempt() -> None:
    """Group names may have dashes and numbers too."""
    assert token("demo", "t4-a-17", 2) == "demo-t4-a-17-2"
    assert order_of_token("demo", "demo-t4-a-17-2") == "t4-a-17"
    assert order_of_token("other", "demo-t4-a-17-2") == ""
    assert order_of_token("demo", "") == ""


def test_instance_is_the_orders_when_its_tag_says_so() -> None:
    """The answer was lost; the list has it."""
    found = advanced(order(), instances=[instance("i-1", token("demo", "t4-1", 0))])
    assert the_slot(found) == Slot(state="known", instance="i-1")


def _joined(**fields: Any) -> Json:
    return elastic_node("gpu", T4_MIB, provider_id="sim:///a/i-1", **fields)


@pytest.mark.parametrize(
    ("node", "state"),
    [
        (_joined(inventory=False), "offering"),
        (_joined(), "offering"),
        (_joined(ready="False"), "joined"),
        (elastic_node("gpu", provider_id="sim:///a/i-1"), "joined"),
    ],
)
def test_node_offers_its_cards_when_it_is_ready_and_has_some(node: Json, state: str) -> None:
    """A node without an inventory has cards if gpushare's own plugin advertises them."""
    record = order(Slot(state="known", instance="i-1"), state="known")
    found = the_slot(advanced(record, nodes=(node,), instances=[instance()]))
    assert (found.state, found.node) == (state, "gpu")
    assert found.offering_at == (NOW if state == "offering" else None)


@pytest.mark.parametrize(
    ("slot", "nodes", "missing", "state"),
    [
        (Slot(state="asked"), (), "the cloud has started no machine", "failed"),
        (
            Slot(state="known", instance="i-1"),
            (),
            "machine i-1 has not joined the cluster",
            "ending",
        ),
        (
            Slot(state="joined", instance="i-1", node="gpu"),
            (_joined(ready="False"),),
            "node gpu is not Ready",
            "ending",
        ),
        (
            Slot(state="joined", instance="i-1", node="gpu"),
            (elastic_node("gpu", provider_id="sim:///a/i-1"),),
            "node gpu offers no cards",
            "ending",
        ),
    ],
)
def test_node_is_ended_when_it_is_not_ready_in_time(
    slot: Slot, nodes: tuple[Json, ...], missing: str, state: str
) -> None:
    """At 900 s it has time still, a second later not. The event says what is missing."""
    pod = pod_json("a", 4)
    slot = msgspec.structs.replace(slot, pods=(pod["metadata"]["uid"],))
    record = order(slot, state=slot.state)
    instances = [instance(order="demo-t4-1-0")] if slot.instance else []
    given: dict[str, Any] = {
        "orders": {"t4-1": record},
        "nodes": nodes,
        "pods": (pod,),
        "instances": instances,
    }
    assert not advance(snapshot(**given, now=NOW + TIMEOUT_S)).failures
    decision = advance(snapshot(**given, now=NOW + TIMEOUT_S + 1))
    found = decision.orders["t4-1"]
    assert the_slot(found).state == state
    assert found is not None
    assert found.failure == "never joined"
    (failure,) = decision.failures
    assert missing in failure.why
    assert [each.metadata.name for each in failure.pods] == ["a"]
    assert decision.ends == ({"i-1"} if slot.instance else frozenset())


def test_rest_of_an_order_is_given_up_when_only_a_part_came() -> None:
    """30 s after the answer; the offer is backed off, and the order lives on."""
    record = order(Slot(state="known", instance="i-1"), Slot(state="asked"), asked_at=NOW)
    given: dict[str, Any] = {
        "orders": {"t4-1": record},
        "instances": [instance(order="demo-t4-1-0")],
    }
    assert not advance(snapshot(**given, now=NOW + 30)).failures
    decision = advance(snapshot(**given, now=NOW + 31))
    found = decision.orders["t4-1"]
    assert found is not None
    assert [slot.state for slot in found.slots] == ["known", "failed"]
    assert found.failure is None
    (failed,) = (each for name, each in decision.orders.items() if name != "t4-1")
    assert failed is not None
    assert failed.failure == "out of stock"


def test_instance_is_gone_when_it_is_missing_in_two_lists() -> None:
    """30 s apart: one list may be of a part of the cloud that does not know it yet."""
    record = order(Slot(state="known", instance="i-1"), state="known")
    given: dict[str, Any] = {"missing": {"i-1": NOW}, "now": NOW + 60}
    assert the_slot(advanced(record, instances_at=NOW + GONE_S - 1, **given)).state == "known"
    assert the_slot(advanced(record, instances_at=NOW + GONE_S, **given)).state == "failed"


def test_nothing_is_decided_when_the_cloud_was_never_read() -> None:
    """What cannot be read is never none."""
    record = order(Slot(state="known", instance="i-1"), state="known")
    decision = advance(snapshot(orders={"t4-1": record}, instances_at=None, now=NOW + 10_000))
    assert (decision.orders, decision.ends, decision.removed) == ({}, frozenset(), ())


def test_node_that_answers_stays_when_the_cloud_lists_nothing() -> None:
    """The configuration names another region. With its kubelet gone, the node goes too."""
    record = order(Slot(state="offering", instance="i-1", node="gpu"), state="offering")
    for ready, removed in (("True", []), ("Unknown", ["gpu"])):
        node = _joined(ready=ready, labels={ORDER: "t4-1"})
        decision = advance(
            snapshot(
                nodes=(node,),
                orders={"t4-1": record},
                missing={"i-1": NOW - 100, "sim:///a/i-1": NOW - 100},
            )
        )
        assert [each.metadata.name for each in decision.removed] == removed
        assert bool(decision.orders) == bool(removed)


# ---- whatever happens ----


class OrdersLife(RuleBasedStateMachine):
    """Orders of up to three nodes, a cloud that answers or not, machines that come, join, offer and go."""

    def __init__(self) -> None:
        super().__init__()
        self.now = NOW
        self.orders: dict[str, OrderRecord] = {}
        self.launched: dict[str, int] = {}
        """The number of machines by token: the cloud's memory."""
        self.machines: dict[str, str] = {}
        """Tokens by machine."""
        self.nodes: dict[str, Json] = {}
        self.missing: dict[str, float] = {}
        self.next_id = 1

    def snapshot(self) -> Snapshot:
        """What is there."""
        given: dict[str, Any] = {
            "now": self.now,
            "config": config(),
            "nodes": tuple(self.nodes.values()),
            "orders": self.orders,
            "instances": [
                instance(name, text, launched_at=NOW) for name, text in self.machines.items()
            ],
            "instances_at": self.now,
        }
        self.missing = listed_missing(snapshot(**given, missing=self.missing))
        return snapshot(**given, missing=self.missing)

    def passes(self) -> None:
        """Make a pass, and do what it decides."""
        decision = advance(self.snapshot())
        for name, record in decision.orders.items():
            if record is None:
                del self.orders[name]
            else:
                self.orders[name] = record
        for name in decision.ends:
            self.stop(name)
        for node in decision.removed:
            self.nodes.pop(node.metadata.name, None)
        for name, record in self.orders.items():
            for slot in record.slots:
                if slot.node in self.nodes:
                    self.nodes[slot.node]["metadata"]["labels"][ORDER] = name

    def stop(self, name: str) -> None:
        """A machine is gone, and its kubelet does not answer any more."""
        self.machines.pop(name, None)
        if f"node-{name}" in self.nodes:
            status = self.nodes[f"node-{name}"]["status"]
            status["conditions"] = [{"type": "Ready", "status": "Unknown"}]

    @initialize(count=st.integers(1, 3))
    def write(self, count: int) -> None:
        """An order is written."""
        self.orders[f"t4-{len(self.launched)}x"] = order(*[Slot()] * count, written_at=self.now)

    def _written(self) -> list[str]:
        return [
            name
            for name, record in self.orders.items()
            if any(slot.state == "written" for slot in record.slots)
        ]

    @precondition(lambda self: self._written())
    @rule(data=st.data(), lost=st.booleans())
    def launch(self, data: st.DataObject, lost: bool) -> None:
        """The cloud is asked, does it or a part of it once for the token, and its answer arrives or not."""
        name = data.draw(st.sampled_from(self._written()))
        asked = launchable("demo", name, self.orders[name])
        if asked.token not in self.launched:
            self.launched[asked.token] = asked.count
            for _ in range(data.draw(st.integers(1, asked.count))):
                self.machines[f"i-{self.next_id}"] = asked.token
                self.next_id += 1
        assert self.launched[asked.token] == asked.count, "the same token is the same order"
        ids = [each for each, text in self.machines.items() if text == asked.token]
        if not lost:
            self.orders[name] = answered(self.orders[name], ids, self.now)
        self.passes()

    @precondition(lambda self: self._written())
    @rule(data=st.data())
    def refuse(self, data: st.DataObject) -> None:
        """The cloud has none."""
        name = data.draw(st.sampled_from(self._written()))
        if launchable("demo", name, self.orders[name]).token not in self.launched:
            self.orders[name] = refused(self.orders[name], OutOfStock(offer().key), self.now)
        self.passes()

    @precondition(lambda self: self.machines)
    @rule(data=st.data(), offers=st.booleans())
    def join(self, data: st.DataObject, offers: bool) -> None:
        """A machine is a node, with cards or without."""
        name = data.draw(st.sampled_from(sorted(self.machines)))
        cards = (T4_MIB,) if offers else ()
        node = elastic_node(f"node-{name}", *cards, provider_id=f"sim:///a/{name}", labels={})
        labels = self.nodes.get(f"node-{name}", node)["metadata"]["labels"]
        node["metadata"]["labels"] = labels
        self.nodes[f"node-{name}"] = node
        self.passes()

    @precondition(lambda self: self.machines)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        """A machine is ended by hand."""
        self.stop(data.draw(st.sampled_from(sorted(self.machines))))
        self.passes()

    @rule()
    def forget(self) -> None:
        """The ConfigMap is deleted, and the leader killed."""
        self.orders = {}
        self.missing = {}
        self.passes()

    @rule(seconds=st.sampled_from([1.0, 31.0, 300.0]))
    def wait(self, seconds: float) -> None:
        """Time passes."""
        self.now += seconds
        self.passes()

    @invariant()
    def one_slot_for_each_machine(self) -> None:
        """Nothing is counted twice."""
        slots = Counter(
            slot.instance for each in self.orders.values() for slot in each.slots if slot.instance
        )
        assert all(count == 1 for count in slots.values()), slots

    @invariant()
    def state_follows_from_slots(self) -> None:
        """An order is over when all of its slots are."""
        for record in self.orders.values():
            live = [slot for slot in record.slots if slot.state not in OVER]
            assert (record.state in OVER) == (not live), record

    def teardown(self) -> None:
        """In the end every machine offers its cards or is gone, and every node has its machine."""
        for _ in range(6):
            self.now += 300
            self.passes()
        offering = {
            name for name, node in self.nodes.items() if "fenka.io/cards" in _annotations(node)
        }
        assert {f"node-{name}" for name in self.machines} == offering
        assert all(
            record.failure is not None or not record.slots for record in self.orders.values()
        ), self.orders


def _annotations(node: Json) -> Json:
    found: Json = node["metadata"]["annotations"]
    return found


OrdersLife.TestCase.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)
test_orders_end_well_whatever_happens = OrdersLife.TestCase
