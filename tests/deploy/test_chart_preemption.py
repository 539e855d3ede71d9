"""Test whom pods may evict in an installation by the chart."""

import yaml

from fenka.cluster.objects import BACKFILL_CLASS
from tests.deploy.chart import CHART, Json, arguments, find, names_of, needs_helm, render

POLICY = "ValidatingAdmissionPolicy"


@needs_helm
def test_services_evict_backfill_only_when_values_are_defaults() -> None:
    """What they may not have without fenka's bound, they are not given: cards are required."""
    objects = render()
    assert "--backfill-only=fenka-serving" in arguments(objects)
    classes = names_of(objects, "PriorityClass")
    assert {"fenka-serving", BACKFILL_CLASS} <= {*classes}
    spec = find(objects, POLICY, "fenka-preemption")["spec"]
    (condition,) = spec["matchConditions"]
    assert condition["expression"].endswith('object.spec.priorityClassName in ["fenka-serving"]')
    cards, scheduler = spec["validations"]
    assert "variables.cards" in cards["expression"]
    assert scheduler["expression"] == 'object.spec.schedulerName in ["default-scheduler"]'


@needs_helm
def test_second_scheduler_places_bounded_pods_when_it_is_enabled() -> None:
    """It calls the extender, too."""
    objects = render(secondScheduler={"enabled": True, "schedulerName": "gpu"})
    validation = find(objects, POLICY, "fenka-preemption")["spec"]["validations"][1]
    assert '"gpu"' in validation["expression"]


@needs_helm
def test_nothing_is_bounded_when_the_administrator_says_so() -> None:
    """Then Kubernetes' own rule holds."""
    objects = render(scheduler={"preemption": {"backfillOnly": []}})
    assert not [text for text in arguments(objects) if "backfill" in text]
    assert "fenka-preemption" not in names_of(objects, POLICY)


@needs_helm
def test_growth_is_taken_back_when_the_administrator_says_so() -> None:
    """By default a pod keeps what it has grown by."""
    option = "--take-growth-back"
    assert option not in arguments(render())
    assert option in arguments(render(scheduler={"takeGrowthBack": True}))


@needs_helm
def test_unstarted_pods_are_evicted_when_the_administrator_says_so() -> None:
    """By default a pod that never starts keeps its card."""
    assert not [text for text in arguments(render()) if "unstarted" in text]
    written = arguments(render(scheduler={"evictUnstartedSeconds": 1_000_000}))
    assert "--evict-unstarted-after=1000000" in written


def test_example_bounds_the_class_that_the_chart_installs() -> None:
    """Everybody who may create pods may give them the class."""
    quota: Json = yaml.safe_load((CHART / "examples" / "serving-quota.yaml").read_text())
    (expression,) = quota["spec"]["scopeSelector"]["matchExpressions"]
    assert expression == {
        "scopeName": "PriorityClass",
        "operator": "In",
        "values": ["fenka-serving"],
    }
    assert quota["spec"]["hard"] == {"pods": "2"}
