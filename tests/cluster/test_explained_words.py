"""Words of an explanation for what users write wrongly, and for pods that hold a card and do not start."""

import pytest

from fenka.cluster.explain import explain
from fenka.cluster.state import ClusterSnapshot
from tests.builders import T4_MIB, a_node, a_pod, on_card


@pytest.mark.parametrize(
    ("text", "advice"),
    [("4Gi", "write 4"), ("512Mi", "write 1"), ("1536Mi", "write 2")],
)
def test_units_are_explained_when_an_amount_has_a_suffix_of_bytes(text: str, advice: str) -> None:
    """4Gi is over four thousand million units: no card is that large."""
    pod = a_pod("p", text)
    (hint,) = explain(pod, ClusterSnapshot.of([a_node("n", T4_MIB)], [pod]), []).hints
    assert f"{text} is " in hint
    assert hint.endswith(f"units are GiB here: {advice}")


@pytest.mark.parametrize(("phase", "told"), [("Pending", True), ("Running", False)])
def test_holder_is_named_as_not_started_when_its_image_never_comes(phase: str, told: bool) -> None:
    """Whoever waits for it looks there, not at the queue."""
    holder = a_pod("h", 14, node="n", annotations=on_card(0, 14), phase=phase)
    pod = a_pod("p", 4)
    (hint,) = explain(pod, ClusterSnapshot.of([a_node("n", T4_MIB)], [pod, holder]), []).hints
    assert ("default/h has not started" in hint) is told


@pytest.mark.parametrize(("app", "told"), [("web", True), ("other", False)])
def test_surge_is_explained_when_a_deployment_updates_on_full_cards(app: str, told: bool) -> None:
    """The new pod waits for the old one, which runs until the new one is ready."""
    labels = {"app": "web", "pod-template-hash": "new"}
    old = {"app": app, "pod-template-hash": "old"}
    holder = a_pod("h", 14, node="n", annotations=on_card(0, 14), labels=old)
    pod = a_pod("p", 14, labels=labels)
    hints = explain(pod, ClusterSnapshot.of([a_node("n", T4_MIB)], [pod, holder]), []).hints
    assert any("maxSurge: 0" in hint for hint in hints) is told
