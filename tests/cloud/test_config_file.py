"""The autoscaler's configuration: what is read, and the sentence for each mistake."""

import contextlib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fenka.cloud.alibaba.settings import EssConfig, EssGroup, EssProviderConfig
from fenka.cloud.config import (
    CardConfig,
    GroupConfig,
    InvalidConfig,
    ScaleIn,
    ScaleOut,
    ShapeConfig,
    SpotRules,
    StartTimes,
)
from fenka.cloud.config_file import check_shapes, decode_config, read_config
from fenka.cloud.port import OfferKey
from fenka.cloud.simulated_cloud import SimulatedConfig, SimulatedProviderConfig
from fenka.core.inventory import Taint
from fenka.core.nodes.case import BuyLimits
from tests.cloud.contract import refusal

HEAD = """
cluster: demo
provider: {kind: ess, region: cn-beijing}
"""
T4 = "name: t4, types: [gn6i], zones: [g]"

COMPLETE = """
cluster: demo
provider: {kind: simulated, region: cn-beijing, scenario: cloud.json, command: [start, "3"]}
scaleOut: {window: 500ms, windowMost: 10s, delay: 1m, timeLimit: 1.5s, pin: 1m30s}
scaleIn: {delay: 20m, cooldown: 0s, mode: repack, repackSaves: 0.5}
start: {timeout: 1h, backoff: 2m, backoffMost: 2m}
limits: {nodes: 20, price: 500, cards: {Tesla T4: 8}}
groups:
- {name: t4-spot, id: asg-2ze1, types: [gn6i, gn6v], zones: [g, h], min: 1, max: 10, capacity: spot,
   spot: {cap: 11.63, admit: all, protection: 1h}, labels: {gpushare: "true"}, startup: 3m, price: 3.4901}
- name: t4
  types: [gn6i]
  zones: [g]
  max: 0
  taints:
  - {key: gpu, effect: NoSchedule}
  - {key: example.com/team, value: a, effect: NoExecute}
  shape:
    cpu: 3800m
    memory: 13.5Gi
    resources: {nvidia.com/mig-1g.10gb: 7}
    cards: [{model: Tesla T4, memory: 15079MiB, count: 2}, {memory: 40Gi}]
"""


def test_configuration_has_the_defaults_when_only_what_is_required_is_given() -> None:
    """They are those of the documentation."""
    config = decode_config(f"{HEAD}groups: [{{{T4}}}]".encode())
    assert config == EssConfig(
        cluster="demo",
        provider=EssProviderConfig(kind="ess", region="cn-beijing"),
        groups=(EssGroup(name="t4", types=("gn6i",), zones=("g",)),),
    )
    assert (config.scale_in.delay, config.scale_in.cooldown, config.start.timeout) == (
        600,
        600,
        900,
    )


def test_configuration_is_read_when_everything_is_given(tmp_path: Path) -> None:
    """Durations in seconds, quantities in thousandths of cores and MiB, the provider's keys as settings."""
    path = tmp_path / "config.yaml"
    path.write_text(COMPLETE)
    assert read_config(path) == SimulatedConfig(
        cluster="demo",
        provider=SimulatedProviderConfig(
            kind="simulated",
            region="cn-beijing",
            scenario="cloud.json",
            command=("start", "3"),
        ),
        scale_out=ScaleOut(window=0.5, window_most=10, delay=60, time_limit=1.5, pin=90),
        scale_in=ScaleIn(delay=1200, cooldown=0, mode="repack", repack_saves=0.5),
        start=StartTimes(timeout=3600, backoff=120, backoff_most=120),
        limits=BuyLimits(nodes=20, price=500, cards={"Tesla T4": 8}),
        groups=(
            GroupConfig(
                name="t4-spot",
                id="asg-2ze1",
                types=("gn6i", "gn6v"),
                zones=("g", "h"),
                min=1,
                max=10,
                capacity="spot",
                spot=SpotRules(cap=11.63, admit="all", protection=3600),
                labels={"gpushare": "true"},
                startup=180,
                price=3.4901,
            ),
            GroupConfig(
                name="t4",
                types=("gn6i",),
                zones=("g",),
                max=0,
                taints=(
                    Taint(key="gpu", effect="NoSchedule"),
                    Taint(key="example.com/team", value="a", effect="NoExecute"),
                ),
                shape=ShapeConfig(
                    cpu_milli=3800,
                    memory_mib=13824,
                    resources={"nvidia.com/mig-1g.10gb": 7},
                    cards=(
                        CardConfig(model="Tesla T4", memory_mib=15079, count=2),
                        CardConfig(memory_mib=40960),
                    ),
                ),
            ),
        ),
    )


@pytest.mark.parametrize(
    ("kind", "rules", "protection"),
    [
        ("ess", "", 3600),
        ("ess", "spot: {cap: 3}", 3600),
        ("ess", "spot: {protection: 0s}", 0),
        ("aws", "", 0),
        ("aws", "spot: {protection: 5m}", 300),
    ],
)
def test_spot_nodes_are_protected_as_the_cloud_protects_them(
    kind: str, rules: str, protection: float
) -> None:
    """Alibaba Cloud for an hour, AWS for no time."""
    head = HEAD.replace("ess", kind)
    text = f"{head}groups: [{{{T4}, capacity: spot{rules and ', ' + rules}}}]"
    assert decode_config(text.encode()).groups[0].spot.protection == protection


def test_configuration_of_the_documentation_is_valid() -> None:
    """Its first example."""
    page = Path(__file__).parents[2] / "docs" / "do" / "autoscale-configuration.md"
    example = page.read_text().partition("```yaml\n")[2].partition("```")[0]
    config = decode_config(example.encode())
    assert [group.name for group in config.groups] == ["t4-spot", "t4"]
    assert (config.scale_out, config.scale_in, config.start) == (
        ScaleOut(),
        ScaleIn(),
        StartTimes(),
    )


def of_group(fields: str) -> str:
    """Return a configuration whose only group has these fields too."""
    return f"{HEAD}groups: [{{{T4}, {fields}}}]"


def with_section(section: str) -> str:
    """Return a configuration with a section before its group."""
    return f"{HEAD}{section}\ngroups: [{{{T4}}}]"


MISTAKES = [
    ("", "the configuration must be an object, not empty"),
    ("[]", "the configuration must be an object, not a list"),
    ("a: [", "the configuration is no YAML: line 1, column 5: "),
    ("a: &x 1\nb: *x", "the configuration has an anchor or alias in line 1: write the value itself"),
    (HEAD, "the configuration has no groups: add it"),
    (f"{HEAD}groups: []", "groups is empty: add the first group"),
    (f"{HEAD}groups: {{}}", "groups must be a list, not an object"),
    (f"{HEAD}groups: [t4]", "groups[0] must be an object, not a text"),
    ("cluster: demo\ngroups: []", "the configuration has no provider: add it"),
    ("cluster: demo\nprovider: ess", "provider must be an object, not a text"),
    (
        "cluster: demo\nprovider: {kind: gce}",
        "provider.kind must be ess, aws, karpenter or simulated, not 'gce'",
    ),
    ("provider: {kind: ess, scenario: x}", "provider.scenario is not known: remove it"),
    ("provider: {kind: simulated, scenari: x}", "provider.scenari is not known: did you mean scenario?"),
    ("provider: {kind: simulated, command: run}", "provider.command must be a list, not a text"),
    (of_group("vSwitches: [a]"), "groups[0].vSwitches must be an object, not a list"),
    (of_group("subnets: {}"), "groups[0].subnets is not known: remove it"),
    (with_section("scaleout: {}"), "scaleout is not known: did you mean scaleOut?"),
    (with_section("scale_in: {}"), "scale_in is not known: did you mean scaleIn?"),
    (with_section("settings: {}"), "settings is not known: remove it"),
    (with_section('"\\e[31m": {}'), "'\\x1b[31m' is not known: remove it"),
    (with_section(f"{'x' * 200}: {{}}"), f"'{'x' * 37}...' is not known: remove it"),
    (of_group("maxx: 3"), "groups[0].maxx is not known: did you mean max?"),
    (of_group("settings: {}"), "groups[0].settings is not known: remove it"),
    (of_group("min: 3, max: 2"), "groups[0].max is 2, less than its min of 3: raise max or lower min"),
    (of_group("max: -1"), "groups[0].max must be a whole number >= 0"),
    (of_group("max: 100001"), "groups[0].max must be a whole number <= 100000"),
    (of_group("max: 2.5"), "groups[0].max must be a whole number, not a number"),
    (of_group("max: true"), "groups[0].max must be a whole number, not true or false"),
    (of_group('max: "3"'), "groups[0].max must be a whole number, not a text"),
    (of_group(f"max: {'9' * 5000}"), "groups[0].max must be a whole number, not a text"),
    (of_group("max: []"), "groups[0].max must be a whole number, not a list"),
    (of_group("max: null"), "groups[0].max must be a whole number, not empty"),
    (
        f"{HEAD}groups: [{{{T4}}}, {{{T4}, id: x}}]",
        "groups[1].name is 't4', as groups[0].name is: write another",
    ),
    (
        f"{HEAD}groups: [{{{T4}, id: x}}, {{name: b, types: [t], zones: [g], id: x}}]",
        "groups[1].id is 'x', as groups[0].id is: write another",
    ),
    (
        f"{HEAD}groups: [{{name: t4, types: [a, b, a], zones: [g]}}]",
        "groups[0].types[2] is 'a', as groups[0].types[0] is: remove it",
    ),
    (f"{HEAD}groups: [{{name: t4, types: [], zones: [g]}}]", "groups[0].types is empty: name one at least"),
    (f"{HEAD}groups: [{{name: t4, zones: [g]}}]", "groups[0] has no types: add it"),
    (f"{HEAD}groups: [{{name: t4, types: gn6i, zones: [g]}}]", "groups[0].types must be a list, not a text"),
    (f"{HEAD}groups: [{{name: t4, types: [1], zones: [g]}}]", "groups[0].types[0] must be a text: write it"),
    (f"{HEAD}groups: [{{name: T4, types: [a], zones: [g]}}]", "groups[0].name is 'T4': write lower-case"),
    (f"{HEAD}groups: [{{name: {'a' * 45}, types: [a], zones: [g]}}]", "groups[0].name and cluster have more"),
    (of_group("capacity: cheap"), "groups[0].capacity must be on-demand or spot, not 'cheap'"),
    (of_group("spot: {cap: 3}"), "groups[0].spot needs capacity: spot: add it, or remove spot"),
    (of_group("spot: {}"), "groups[0].spot needs capacity: spot: add it, or remove spot"),
    (of_group("capacity: spot, spot: {admit: some}"), "groups[0].spot.admit must be marked or all, not 's"),
    (of_group("price: -1"), "groups[0].price is -1: it must be 0 to 10000000"),
    (of_group("price: 1.23456"), "groups[0].price is 1.23456: it may have 4 decimals"),
    (of_group("price: .nan"), "groups[0].price must be a number or empty, not a text"),
    (of_group("price: .inf"), "groups[0].price must be a number or empty, not a text"),
    (of_group("price: 1e99"), "groups[0].price is 1e+99: it must be 0 to 10000000"),
    (of_group("price: nan"), "groups[0].price must be a number or empty, not a text"),
    (with_section("limits: {price: -0.5}"), "limits.price is -0.5: it must be 0 to 10000000"),
    (of_group("startup: 180"), "groups[0].startup must be a duration with its unit: write 180s"),
    (of_group("startup: 1w"), "groups[0].startup must be a duration with its unit: write 30s or 10m"),
    (of_group("startup: -3"), "groups[0].startup must be a duration with its unit: write 30s or 10m"),
    (of_group("startup: 400d"), "groups[0].startup is longer than a year: write at most 365d"),
    (with_section("scaleIn: {delay: ten}"), "scaleIn.delay must be a duration with its unit: write 30s or"),
    (with_section("scaleOut: {timeLimit: 0s}"), "scaleOut.timeLimit is 0: write more"),
    (with_section("start: {timeout: 0s}"), "start.timeout is 0: write more"),
    (
        with_section("scaleOut: {window: 20s}"),
        "scaleOut.windowMost is 10s, less than scaleOut.window, which is 20s: raise it",
    ),
    (
        with_section("start: {backoff: 1h}"),
        "start.backoffMost is 1800s, less than start.backoff, which is 3600s: raise it",
    ),
    (
        f"{HEAD}limits: {{nodes: 2}}\ngroups: [{{{T4}, min: 3}}]",
        "limits.nodes is 2, less than the 3 that the groups' min requires: raise it, or lower a min",
    ),
    (of_group("labels: {a: true}"), "groups[0].labels.a must be a text: write it in quotes"),
    (of_group("labels: {a: b/c}"), "groups[0].labels has 'a' with 'b/c', which Kubernetes does not allow"),
    (of_group("labels: {-a: b}"), "groups[0].labels has '-a' with 'b', which Kubernetes does not allow"),
    (of_group("labels: {fenka.io/group: b}"), "groups[0].labels has fenka.io/group, which the autoscaler "),
    (of_group("taints: [{key: a}]"), "groups[0].taints[0] has no effect: add it"),
    (of_group("taints: [{key: a, effect: No}]"), "groups[0].taints[0].effect must be NoSchedule, PreferNo"),
    (of_group("shape: {cpu: 4}"), "groups[0].shape has no memory: add it"),
    (of_group("shape: {cpu: four, memory: 4Gi}"), "groups[0].shape.cpu must be a number of cores: write 4"),
    (of_group("shape: {cpu: [], memory: 4Gi}"), "groups[0].shape.cpu must be a number of cores: write 4 or"),
    (of_group("shape: {cpu: 4, memory: 15079}"), "groups[0].shape.memory must be an amount of memory with"),
    (of_group("shape: {cpu: 4, memory: 1k}"), "groups[0].shape.memory must be an amount of memory: write "),
    (
        of_group("shape: {cpu: 4, memory: 4Gi, cards: [{memory: 4Gi, count: 999}, {memory: 4G, count: 99}]}"),
        "groups[0].shape.cards are more than 1024: count them again",
    ),
    *(
        (
            of_group(f"shape: {{cpu: 4, memory: 4Gi, resources: {{{name}: 1}}}}"),
            f"groups[0].shape.resources.{name} is no counted resource: remove it",
        )
        for name in ("cpu", "memory", "pods", "ephemeral-storage")
    ),
]  # fmt: skip


@pytest.mark.parametrize(("text", "sentence"), MISTAKES)
def test_configuration_is_refused_with_a_sentence_when_it_has_a_mistake(
    text: str, sentence: str
) -> None:
    """The sentence names the field and says what to do."""
    with pytest.raises(InvalidConfig) as why:
        decode_config(text.encode())
    assert str(why.value).startswith(sentence)
    assert "\n" not in str(why.value)
    assert why.value.exit_code == 2


def offer(kind: str, zone: str, group: str = "t4") -> OfferKey:
    """Return what a provider has."""
    return OfferKey(group, kind, zone, "on-demand")


@pytest.mark.parametrize(
    ("offers", "sentence"),
    [
        ([offer("gn6i", "g")], ""),
        ([offer("gn6", "g")], ".types[0]: the provider has no gn6i for t4: did you mean gn6?"),
        ([offer("gn6i", "cn-beijing-x")], ".zones[0]: the provider has no g for t4: remove it"),
        ([offer("gn6i", "g", "other")], ": the provider has no gn6i in g: correct types or zones of t4"),
    ],
)  # fmt: skip
def test_offers_are_checked_when_the_provider_says_what_it_has(
    offers: list[OfferKey], sentence: str
) -> None:
    """A type or zone that it has not would never be bought."""
    config = decode_config(f"{HEAD}groups: [{{{T4}}}]".encode())
    assert refusal(config, offers) == (sentence and f"groups[0]{sentence}")


def test_shapes_are_checked_when_it_is_known_what_nodes_will_be() -> None:
    """A type needs none if nodes of it were seen, the provider describes it, or its group has one."""
    config = decode_config(COMPLETE.encode())
    check_shapes(config, {"gn6i", "gn6v"})
    with pytest.raises(InvalidConfig) as why:
        check_shapes(config, {"gn6i"})
    assert str(why.value) == (
        "groups[0].types[1]: the shape of gn6v is not known: say shape: for it"
    )


@given(st.recursive(st.sampled_from(["", "a", "3", "-1", "ess", "3s", '"\\0"', "true", "spot"]),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3).map(lambda items: f"[{', '.join(items)}]"),
        st.dictionaries(st.sampled_from(["cluster", "provider", "kind", "groups", "name", "types", "zones",
            "spot", "labels", "shape", "cards", "limits", "max"]), inner, max_size=5)
        .map(lambda fields: "{" + ", ".join(f"{key}: {value}" for key, value in fields.items()) + "}"),
    ), max_leaves=20))  # fmt: skip
def test_configuration_raises_nothing_else_whatever_it_is(text: str) -> None:
    """No type of a value is assumed before it is checked."""
    with contextlib.suppress(InvalidConfig):
        decode_config(text.encode())
