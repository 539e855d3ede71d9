"""Which gang a pod is in, by its labels and by PodGroups."""

import msgspec
import pytest

from fenka.cluster.objects import SchedulingGroup
from fenka.cluster.pod_groups import (
    MINIMUM_LABEL,
    NAME_LABELS,
    PodGang,
    PodGroup,
    group_key,
    group_name,
    pod_group,
)
from fenka.dialects.base import InvalidRecord
from tests.builders import Json, a_pod, gang_labels


def group(policy: Json) -> dict[str, PodGroup]:
    """Return the PodGroup default/native with this policy."""
    body = {"metadata": {"name": "native"}, "spec": {"schedulingPolicy": policy}}
    return {"default/native": msgspec.convert(body, PodGroup)}


@pytest.mark.parametrize(
    ("labels", "expected"),
    [
        ({}, None),
        *(({label: "g"}, "g") for label in NAME_LABELS),
        # the first label counts, unless it is empty
        (dict(zip(NAME_LABELS, ("a", "b", "c"), strict=True)), "a"),
        (dict(zip(NAME_LABELS, ("", "b", "c"), strict=True)), "b"),
        (dict.fromkeys(NAME_LABELS, ""), None),
    ],
)
def test_group_is_named_by_the_first_label_that_is_set(
    labels: dict[str, str], expected: str | None
) -> None:
    """scheduler-plugins have had three labels."""
    pod = a_pod("p", 1, labels=labels)
    assert group_name(pod) == expected
    assert group_key(pod) == (expected and f"default/{expected}")


@pytest.mark.parametrize("minimum", ["1", "2", "10000", "0002"])
def test_gang_has_the_size_of_its_label_when_it_is_valid(minimum: str) -> None:
    """From 1 to 10,000."""
    labels = gang_labels("g", 1) | {MINIMUM_LABEL: minimum}
    gang = pod_group(a_pod("p", 1, namespace="team", labels=labels), {})
    assert gang == PodGang("team", "g", int(minimum))
    assert gang.key == "team/g"


@pytest.mark.parametrize(
    "minimum",
    ["", "0", "-1", "2.0", "two", "10001", "1000000", "9" * 60, "9" * 5000, "000001" + "0" * 57],
)
def test_gang_size_is_rejected_when_the_label_is_not_a_number_up_to_10000(minimum: str) -> None:
    """Its sentence says what to write."""
    labels = gang_labels("g", 1) | {MINIMUM_LABEL: minimum}
    with pytest.raises(InvalidRecord, match="set it to the number of pods that start together"):
        pod_group(a_pod("p", 1, labels=labels), {})


def test_pod_group_precedes_labels_when_a_pod_has_both() -> None:
    """The labels of another scheduler may have stayed on the pod."""
    pod = a_pod("p", 1, labels=gang_labels("labelled", 2))
    pod.spec.scheduling_group = SchedulingGroup(pod_group_name="native")
    assert group_name(pod) == "native"
    assert pod_group(pod, group({"gang": {"minCount": 3}})) == PodGang("default", "native", 3)
    assert pod_group(pod, group({})) is None
    with pytest.raises(InvalidRecord, match="its PodGroup native does not exist"):
        pod_group(pod, {})
