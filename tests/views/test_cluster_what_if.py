"""What-if on a cluster: what it says happens when it is done."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fenka.cluster.objects import Node, Pod
from fenka.cluster.queue_snapshot import SchedulerOptions
from fenka.cluster.state import ClusterSnapshot
from fenka.views.board import WhatIf
from fenka.views.cluster_queue import cluster_queue
from fenka.views.cluster_what_if import InvalidClusterQuestion, what_if
from tests.builders import T4_MIB, a_node, on_card
from tests.fakes.queue import START, make, pending

NODE = a_node("n", T4_MIB)
PLAIN = SchedulerOptions()
NOW = START + 100


def holder(name: str, units: int) -> Pod:
    """Return a pod that holds units of node n's card."""
    return make(name, units, started=0, node="n", annotations=on_card(0, units))


def placed(nodes: list[Node], pods: list[Pod]) -> list[str]:
    """Return the names of the pending pods that there is room for now."""
    rows = cluster_queue(ClusterSnapshot.of(nodes, pods), PLAIN, NOW)
    return [row.name for row in rows if row.why.startswith("there is room now")]


def test_two_more_cards_start_two_of_three() -> None:
    """Of three requests for 12 of 14 units two fit on two more T4s, the first two."""
    waiting = [pending(name, 12, at) for at, name in enumerate(("a", "b", "c"))]
    snapshot = ClusterSnapshot.of([NODE], [holder("h", 4), *waiting])
    answer = what_if(snapshot, PLAIN, WhatIf(add={"Tesla T4": 2}), NOW)
    assert answer.starts == ["a", "b"]
    assert [name for name, _ in answer.waits] == ["c"]
    assert answer.sentence.startswith("2 of 3 start: a, b. c: no GPU fits")


def test_end_of_a_pod_starts_what_waits_for_it() -> None:
    """Without h the card has 14 units; nothing of the cluster is changed."""
    snapshot = ClusterSnapshot.of([NODE], [holder("h", 4), pending("a", 12, 1)])
    uid = next(pod.metadata.uid for pod in snapshot.pods if pod.metadata.name == "h")
    answer = what_if(snapshot, PLAIN, WhatIf(end=[uid]), NOW)
    assert answer.sentence == "1 of 1 starts: a"
    assert snapshot.state.allocation(uid) is not None


def test_nothing_waits() -> None:
    """An empty queue is no error."""
    snapshot = ClusterSnapshot.of([NODE], [holder("h", 4)])
    assert what_if(snapshot, PLAIN, WhatIf(), NOW).sentence == "nothing waits"


@pytest.mark.parametrize(
    ("question", "sentence"),
    [
        (WhatIf(end=["nobody"]), "no pod has the id nobody: it has ended"),
        (WhatIf(add={"A100": 1}), "no node has a card 'A100': here are Tesla T4"),
        (WhatIf(add={"Tesla T4": 65}), "a question adds 0 to 64 cards"),
        (WhatIf(add={"Tesla T4": -1}), "a question adds 0 to 64 cards"),
    ],
)
def test_impossible_question_has_one_sentence(question: WhatIf, sentence: str) -> None:
    """It says what there is."""
    snapshot = ClusterSnapshot.of([NODE], [holder("h", 4)])
    with pytest.raises(InvalidClusterQuestion, match=f"^{sentence}$"):
        what_if(snapshot, PLAIN, question, NOW)


@settings(max_examples=30)
@given(
    st.lists(st.integers(1, 14), max_size=4),
    st.lists(st.integers(1, 14), max_size=5),
    st.integers(0, 2),
    st.data(),
)
def test_answer_is_what_happens(
    held: list[int], asked: list[int], cards: int, data: st.DataObject
) -> None:
    """In random worlds: end these pods and add such a node, and the same requests are placed."""
    holders, room = list[Pod](), 14
    for number, units in enumerate(held):
        if units <= room:
            room -= units
            holders.append(holder(f"h{number}", units))
    waiting = [pending(f"w{number}", units, number) for number, units in enumerate(asked)]
    names = [pod.metadata.uid for pod in holders]
    ended = data.draw(st.sets(st.sampled_from(names)) if names else st.just(set[str]()))
    question = WhatIf(sorted(ended), {"Tesla T4": cards})
    snapshot = ClusterSnapshot.of([NODE], [*holders, *waiting])
    answer = what_if(snapshot, PLAIN, question, NOW)
    # Of equal cards those of the first name are reserved, so the further node has the name of the copy's.
    nodes = [NODE, a_node("what-if-0", *[T4_MIB] * cards)] if cards else [NODE]
    left = [pod for pod in holders if pod.metadata.uid not in ended]
    assert answer.starts == placed(nodes, [*left, *waiting])
