"""Pods as hostile tenants write them: amounts, names and records at and beyond all bounds."""

from typing import Any

from hypothesis import strategies as st

from fenka.cluster.autoscaling import CAPACITY, GROUP, INTERRUPTIBLE, PLANNED, PLANNED_PODS
from fenka.cluster.pod_groups import MINIMUM_LABEL, NAME_LABELS
from fenka.dialects.registry import WITH_HAMI, option_names, resource_names
from tests.builders import Json, unschedulable

QUANTITIES: st.SearchStrategy[str | int] = st.one_of(
    st.sampled_from(
        [
            *("", "0", "1", "4", "-1", "-0", "+1", "1.5", "0.0001", "100m", "1n", "١"),
            *("100", "101", "1000000", "17179869184", "16777217", "9223372036854775807"),
            *("9" * 30, "9" * 31, "9" * 5000, "9" * 5000 + "m", "1." + "9" * 5000, "1e99", "1E-99"),
            *("1Ei", "-1Ei", "9e30", "0x1", "NaN", "inf", "1_000", " 4 ", "4\n", "m", "."),
        ]
    ),
    st.integers(-(2**63), 2**63 - 1),
    st.integers(0, 200),
    st.text(max_size=8),
)
"""Of resources. The API server accepts some of them only; nothing may rely on that."""

TEXTS = st.one_of(
    st.sampled_from(
        [
            *("", "true", "null", "0", "0,0", "0,1", "999999999", "[", "[" * 5000, "{}", "[0]"),
            *('{"0":{"c0":{"0":9007199254740991}}}', '{"c0":{"0":4}}', '{"0":"GPU-gpu-0"}'),
            *('{"0":"other"}', "GPU-gpu-0,NVIDIA,9007199254740991,100:;", "2027-01-15T08:00:00Z"),
            *("9" * 5000, "-1", "1", "2", "10000", "10001", "soft", "weight", "hard", "100", "²"),
        ]
    ),
    st.text(max_size=12),
)
"""Of labels and annotations."""

RESOURCES = sorted(
    {
        *resource_names(WITH_HAMI).names,
        "nvidia.com/gpu",
        "nvidia.com/mig-1g.5gb",
        "cpu",
        "memory",
        "x/y",
    }
)
_RECORDS = sorted({name for dialect in WITH_HAMI for name in dialect.RECORDS})
ANNOTATIONS = sorted(
    {*option_names(WITH_HAMI), *_RECORDS, INTERRUPTIBLE, PLANNED, PLANNED_PODS, "fenka.io/resize"}
)
LABELS = sorted({*NAME_LABELS, MINIMUM_LABEL, *option_names(WITH_HAMI), GROUP, CAPACITY})

_LARGE = st.sampled_from(["1", "4", "100", "200", "16385", "1000000", "17179869185", "9" * 19])
_AMOUNTS = st.one_of(
    st.dictionaries(st.sampled_from(RESOURCES), QUANTITIES, max_size=4),
    # Dialects understand these, and nodes have no such cards.
    st.fixed_dictionaries({"aliyun.com/gpu-mem": _LARGE}),
    st.fixed_dictionaries({"nvidia.com/gpu": _LARGE}),
    st.fixed_dictionaries({"aliyun.com/gpu-core.percentage": st.sampled_from(["20", "100"])}),
    st.fixed_dictionaries({"tencent.com/vcuda-core": _LARGE, "tencent.com/vcuda-memory": _LARGE}),
    st.fixed_dictionaries({"nvidia.com/gpu": _LARGE, "nvidia.com/gpumem": _LARGE}),
)
_BIG = st.one_of(st.none(), st.sampled_from([-(2**63), -1, 0, 1, 2**31, 2**63 - 1]))
_OPERATORS = st.sampled_from(["In", "NotIn", "Exists", "DoesNotExist", "Gt", "Lt", "", "Odd"])
_EXPRESSIONS = st.lists(
    st.fixed_dictionaries(
        {
            "key": st.sampled_from(["kubernetes.io/os", "metadata.name", GROUP, ""]),
            "operator": _OPERATORS,
            "values": st.lists(TEXTS, max_size=2),
        }
    ),
    max_size=2,
)
_TERMS = st.lists(
    st.fixed_dictionaries({"matchExpressions": _EXPRESSIONS, "matchFields": _EXPRESSIONS}),
    max_size=2,
)
_REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"
_AFFINITY = st.one_of(
    st.none(),
    st.fixed_dictionaries(
        {
            "nodeAffinity": st.one_of(
                st.none(),
                st.fixed_dictionaries(
                    {_REQUIRED: st.fixed_dictionaries({"nodeSelectorTerms": _TERMS})}
                ),
            )
        }
    ),
)
_TOLERATIONS = st.lists(
    st.fixed_dictionaries(
        {
            "key": st.sampled_from(["", "k", "fenka.io/ending"]),
            "operator": st.sampled_from(["", "Equal", "Exists", "Gt", "Odd"]),
            "value": TEXTS,
            "effect": st.sampled_from(["", "NoSchedule", "NoExecute", "Odd"]),
        }
    ),
    max_size=2,
)
_OWNERS = st.sampled_from([[], [{"kind": "Job", "name": "j", "uid": "j", "controller": True}]])
_MOMENTS = st.sampled_from(["", "2027-01-15T07:00:00Z", "0000-00-00", "9999-99-99", "now"])


@st.composite
def _container(draw: st.DrawFn, name: str) -> Json:
    limits = draw(_AMOUNTS)
    requests = draw(st.one_of(st.just(limits), _AMOUNTS))
    policy = draw(st.sampled_from([None, None, "Always"]))
    resources = {"limits": limits, "requests": requests}
    return {"name": name, "resources": resources, "restartPolicy": policy}


@st.composite
def hostile_pods(draw: st.DrawFn, name: str) -> Json:
    """Draw a pod of such a tenant; its UID is its name. It is pending, or on node `gpu`."""
    spec: dict[str, Any] = {
        "containers": [
            draw(_container(f"c{it}")) for it in range(draw(st.sampled_from([1, 1, 0, 3])))
        ],
        "initContainers": [
            draw(_container(f"i{it}")) for it in range(draw(st.sampled_from([0, 0, 2])))
        ],
        "overhead": draw(st.one_of(st.just({}), _AMOUNTS)),
        "schedulerName": "default-scheduler",
        "nodeName": draw(st.sampled_from(["", "", "gpu"])),
        "priority": draw(_BIG),
        "activeDeadlineSeconds": draw(_BIG),
        "terminationGracePeriodSeconds": draw(_BIG),
        "nodeSelector": draw(
            st.dictionaries(st.sampled_from([GROUP, "disk", "fenka.io/eligible-0"]), TEXTS)
        ),
        "affinity": draw(_AFFINITY),
        "tolerations": draw(_TOLERATIONS),
    }
    metadata = {
        "name": name,
        "namespace": "hostile",
        "uid": name,
        "labels": draw(st.dictionaries(st.sampled_from(LABELS), TEXTS, max_size=3)),
        "annotations": draw(st.dictionaries(st.sampled_from(ANNOTATIONS), TEXTS, max_size=4)),
        "ownerReferences": draw(_OWNERS),
        "creationTimestamp": draw(_MOMENTS),
        "deletionTimestamp": draw(st.one_of(st.none(), st.none(), _MOMENTS)),
    }
    status = {"phase": "Pending", **unschedulable("0/1 nodes are available")}
    return {"metadata": metadata, "spec": spec, "status": status}
