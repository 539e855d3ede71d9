"""Words of an explanation for what users write wrongly, and for pods that hold a card and do not start."""

from typing import Any

import pytest

from fenka.cluster.explain import CHANGE_REQUEST, explain
from fenka.cluster.state import ClusterSnapshot
from tests.builders import T4_MIB, a_node, a_pod, on_card


@pytest.mark.parametrize(
    ("text", "advice"),
    [("4Gi", "write 4"), ("512Mi", "write 1"), ("1536Mi", "write 2")],
)
def test_units_are_explained_when_an_amount_has_a_suffix_of_bytes(text: str, advice: str) -> None:
    """4Gi is over four thousand million units: no card is that large."""
    pod = a_pod("p", text)
    explanation = explain(pod, ClusterSnapshot.of([a_node("n", T4_MIB)], [pod]), [])
    assert f"{text} is " in explanation.never
    assert explanation.never.endswith(f"units are GiB here: {advice}")
    assert explanation.hints[0] == CHANGE_REQUEST


def container(reason: str = "", made: str = "") -> dict[str, Any]:
    """Return the status of a container that waits for this reason, or was made."""
    state = {"waiting": {"reason": reason, "message": "hostile\x1b[2J"}} if reason else {}
    return {"name": "c", "state": state, "containerID": made}


STARTED = {"startTime": "2026-01-01T08:00:00Z"}
NO_VOLUME = {"type": "PodReadyToStartContainers", "status": "False"}


@pytest.mark.parametrize(
    ("status", "said"),
    [
        ({"phase": "Running"}, ""),
        ({"phase": "Pending"}, "default/h has not started: fenka why default/h says more"),
        (
            {**STARTED, "containerStatuses": [container("ImagePullBackOff")]},
            "default/h has not started since 2026-01-01T08:00:00Z (ImagePullBackOff): fenka why",
        ),
        (
            {
                **STARTED,
                "containerStatuses": [container("ContainerCreating")],
                "conditions": [NO_VOLUME],
            },
            "(ContainerCreating, its volumes, Secrets or network are missing)",
        ),
        (
            {
                **STARTED,
                "initContainerStatuses": [container(made="containerd://a")],
                "containerStatuses": [container("PodInitializing")],
            },
            "default/h has run only its init containers since 2026-01-01T08:00:00Z",
        ),
        ({"containerStatuses": [container("A" * 4096)]}, f"({'A' * 40})"),
    ],
)
def test_holder_is_named_with_its_reason_when_it_has_not_started(
    status: dict[str, Any], said: str
) -> None:
    """Whoever waits for it looks there, not at the queue."""
    holder = a_pod("h", 14, node="n", annotations=on_card(0, 14), phase="Pending", status=status)
    pod = a_pod("p", 4)
    (hint,) = explain(pod, ClusterSnapshot.of([a_node("n", T4_MIB)], [pod, holder]), []).hints
    assert hint.startswith("it starts when default/h ends (14 units on card 0 of n)")
    assert said in hint
    assert ("; " in hint) == bool(said)
    assert "hostile" not in hint


@pytest.mark.parametrize(("app", "told"), [("web", True), ("other", False)])
def test_surge_is_explained_when_a_deployment_updates_on_full_cards(app: str, told: bool) -> None:
    """The new pod waits for the old one, which runs until the new one is ready."""
    labels = {"app": "web", "pod-template-hash": "new"}
    old = {"app": app, "pod-template-hash": "old"}
    holder = a_pod("h", 14, node="n", annotations=on_card(0, 14), labels=old)
    pod = a_pod("p", 14, labels=labels)
    hints = explain(pod, ClusterSnapshot.of([a_node("n", T4_MIB)], [pod, holder]), []).hints
    assert any("maxSurge: 0" in hint for hint in hints) is told


@pytest.mark.parametrize(
    ("name", "told"), [("web-old-abcde", True), ("web-2-old-abcde", False), ("other", False)]
)
def test_surge_is_explained_when_other_labels_change_with_the_version(
    name: str, told: bool
) -> None:
    """Helm writes a release's version into the labels of its pods."""
    labels = {"version": "2", "pod-template-hash": "new"}
    old = {"version": "1", "pod-template-hash": "old"}
    holder = a_pod(name, 14, node="n", annotations=on_card(0, 14), labels=old)
    pod = a_pod("web-new-fghij", 14, labels=labels)
    hints = explain(pod, ClusterSnapshot.of([a_node("n", T4_MIB)], [pod, holder]), []).hints
    assert any("maxSurge: 0" in hint for hint in hints) is told


@pytest.mark.parametrize(("text", "told"), [("7", True), ("0", False)])
def test_cordon_is_named_when_it_is_of_no_card(text: str, told: bool) -> None:
    """Who waits sees which annotation is wrong."""
    node = a_node("n", T4_MIB, annotations={"fenka.io/cordoned": text})
    pod = a_pod("p", 4)
    notes = explain(pod, ClusterSnapshot.of([node], [pod]), []).notes
    assert any("n: annotation fenka.io/cordoned names 7" in note for note in notes) is told
