"""What the autoscaler writes on spot nodes, by which the scheduler knows which pods they admit."""

from collections.abc import Mapping

import pytest

from fenka.autoscaler.node_registration import node_changes
from fenka.cloud.config import GroupConfig, SpotRules
from fenka.cluster.autoscaling import CAPACITY, GROUP, PROTECTED_UNTIL, SPOT_ADMIT, encode_time
from tests.autoscaler.snapshots import NOW, config, elastic_node, group, instance, snapshot
from tests.builders import T4_MIB

UNTIL = encode_time(NOW + 3600)


def spot(**rules: object) -> GroupConfig:
    """Return a group of spot nodes with these rules."""
    return group("spot", capacity="spot", spot=SpotRules(**rules))  # type: ignore[arg-type]


def changes_of(
    settings: GroupConfig, present: Mapping[str, str], *, listed: bool = True
) -> Mapping[str, str | None]:
    """Return what is written to a spot node whose order is over. listed: the cloud knows its machine."""
    node = elastic_node(
        "n",
        T4_MIB,
        provider_id="sim:///a/i-1",
        labels={CAPACITY: "spot", GROUP: "spot"},
        annotations=dict(present),
    )
    instances = (instance(),) if listed else ()
    changes = node_changes(snapshot(nodes=(node,), config=config(settings), instances=instances))
    assert len(changes) <= 1
    return changes[0].annotations if changes else {}


@pytest.mark.parametrize(
    ("settings", "present", "written"),
    [
        (spot(), {}, {SPOT_ADMIT: "marked"}),
        (spot(admit="all"), {SPOT_ADMIT: "marked"}, {SPOT_ADMIT: "all"}),
        (spot(protection=3600), {}, {SPOT_ADMIT: "marked", PROTECTED_UNTIL: UNTIL}),
        (spot(protection=3600), {SPOT_ADMIT: "marked", PROTECTED_UNTIL: UNTIL}, {}),
        (spot(), {SPOT_ADMIT: "marked", PROTECTED_UNTIL: UNTIL}, {PROTECTED_UNTIL: None}),
        # A group that was removed from the configuration leaves its nodes as they are.
        (group("other"), {SPOT_ADMIT: "all"}, {}),
    ],
)
def test_spot_node_gets_the_rules_of_its_group(
    settings: GroupConfig, present: Mapping[str, str], written: Mapping[str, str | None]
) -> None:
    """Also after its order: the configuration may change."""
    assert changes_of(settings, present) == written


def test_protection_stays_when_the_cloud_does_not_list_the_machine() -> None:
    """What cannot be read is no reason to change anything."""
    present = {SPOT_ADMIT: "marked", PROTECTED_UNTIL: UNTIL}
    assert changes_of(spot(protection=3600), present, listed=False) == {}


def test_nothing_is_written_on_nodes_that_stay() -> None:
    """The rule is about spot nodes."""
    node = elastic_node("n", T4_MIB, provider_id="sim:///a/i-1", labels={GROUP: "t4"})
    assert node_changes(snapshot(nodes=(node,), instances=(instance(),))) == []
