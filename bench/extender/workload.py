"""The objects of the benchmark's cluster, as the API server shows them; each is a function of its number.

Nodes have 8 cards of 80 GiB and 16 pods. No two requests are of the same size. Objects have the fields that
kubelets and controllers write in a real cluster, so that reading them costs what it costs there.
"""

import random
from functools import lru_cache
from typing import Any

import msgspec

from fenka.cluster.objects import Pod
from fenka.cluster.pod_groups import MINIMUM_LABEL, NAME_LABELS
from fenka.cluster.state import read_allocation
from fenka.core.request import Placement, Slice
from fenka.dialects import ack, gpu_manager, gpushare, lease_records, nodes
from fenka.dialects.base import SharedNode
from tests.builders import node_json, pod

Json = dict[str, Any]

CARDS, CARD_MIB, PODS_PER_NODE = 8, 81_920, 16
MEMBERS = 4
"""Pods of a gang."""
STARTED = "2026-11-01T08:00:00Z"

_MANAGED = [
    {
        "manager": manager,
        "operation": "Update",
        "apiVersion": "v1",
        "time": STARTED,
        "fieldsType": "FieldsV1",
        "fieldsV1": {
            f"f:{part}": {f"f:{field}": {} for field in fields.split()} for part in ("a", "b", "c")
        },
    }
    for manager, fields in (
        (
            "kube-controller-manager",
            "labels name ownerReferences containers dnsPolicy restartPolicy",
        ),
        ("kubelet", "conditions containerStatuses hostIP phase podIP podIPs startTime"),
    )
]
_SERVICE_ACCOUNT = "/var/run/secrets/kubernetes.io/serviceaccount"
_TOLERATIONS = [
    {"key": f"node.kubernetes.io/{key}", "operator": "Exists", "effect": "NoExecute"}
    for key in ("not-ready", "unreachable")
]
_IMAGES = [
    {"names": [f"registry.example.com/team-{i}/training@sha256:{i:064x}"], "sizeBytes": 4_000_000}
    for i in range(40)
]


def node_name(number: int) -> str:
    """Return the name of a node."""
    return f"gpu-node-{number:05}.example.internal"


def node(number: int, *, reports: bool = True) -> Json:
    """Return a node with an inventory in MiB.

    reports: whether it says what its first residents hold, as fenka's node program does, unlike gpushare's.
    """
    made = node_json(
        node_name(number), *[CARD_MIB] * CARDS, unit_mib=1, labels={"gpushare": "true"}
    )
    made["metadata"] |= {"managedFields": _MANAGED, "creationTimestamp": STARTED}
    made["metadata"]["labels"] |= {f"example.com/label-{i}": f"value-{i}" for i in range(15)}
    made["status"]["images"] = _IMAGES
    if reports:
        made["metadata"]["annotations"][lease_records.REPORT] = lease_records.encode_report(
            _report(number)
        )
    return made


def _report(number: int) -> lease_records.LeaseReport:
    """Return what the first residents of a node hold."""
    slices, first = {}, number * PODS_PER_NODE
    for place in range(first, first + PODS_PER_NODE):
        parsed = msgspec.convert(resident(place), Pod)
        allocation = read_allocation(_shared(number), parsed)
        assert allocation is not None
        slices[parsed.metadata.uid] = allocation.slices
    return lease_records.LeaseReport(slices)


@lru_cache(maxsize=64)
def _shared(number: int) -> SharedNode:
    made = node(number, reports=False)
    shared = nodes.decode_node(
        node_name(number), made["metadata"]["annotations"], made["status"]["allocatable"]
    )
    assert shared is not None
    return shared


def resident(place: int, generation: int = 0) -> Json:
    """Return a pod that runs at a place: two share a card. generation: counts the pods of this place."""
    rng = random.Random(f"{place}/{generation}")
    limits: Json = {gpushare.MEMORY: rng.randint(8_192, 32_768)}
    if rng.random() < 0.5:
        limits[ack.CORE] = rng.randrange(5, 45, 5)
    number, card = divmod(place, PODS_PER_NODE)
    shared = _shared(number)
    device = shared.node.cards[card * CARDS // PODS_PER_NODE]
    made = _pod(f"trainer-{place}-{generation}", limits, rng, node=node_name(number))
    piece = Slice(device.index, device.uuid, limits[gpushare.MEMORY], limits.get(ack.CORE, 0))
    placement = Placement(node_name(number), (piece,))
    parsed = msgspec.convert(made, Pod)
    dialect = parsed.demand().dialect
    assert dialect is not None
    stamp = 1_790_000_000_000_000_000 + place
    made["metadata"]["annotations"] = dialect.encode(parsed.request, shared, (placement,), stamp)
    return made


def request(number: int) -> Json:
    """Return a pod without a node: of its own size, some with a share of compute or of two containers."""
    rng = random.Random(f"request-{number}")
    memory = rng.randint(1_000, 60_000)
    kind = rng.random()
    if kind < 0.2:
        parts = [
            {gpu_manager.CORE: rng.randint(5, 40), gpu_manager.MEMORY: part // 256 + 1}
            for part in (memory // 2, rng.randint(1_000, 30_000))
        ]
        return _pod(f"request-{number}", parts[0], rng, more=parts[1:])
    limits: Json = {gpushare.MEMORY: memory}
    if kind < 0.45:
        limits[ack.CORE] = rng.randrange(5, 55, 5)
    more = [{gpushare.MEMORY: rng.randint(1_000, 10_000)}] if 0.45 <= kind < 0.6 else []
    return _pod(f"request-{number}", limits, rng, more=more)


def pending(number: int) -> Json:
    """Return a pod that kube-scheduler has found no node for: it requests most of all cards of a node."""
    rng = random.Random(f"pending-{number}")
    memory = CARDS * (66_000 + number * 20)
    made = _pod(f"pending-{number}", {gpushare.MEMORY: memory}, rng)
    made["metadata"]["labels"][gpushare.COUNT] = str(CARDS)
    reason = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "no"}
    made["status"]["conditions"] = [reason]
    return made


def gangs(count: int, namespaces: int) -> list[Json]:
    """Return the pods of some gangs of MEMBERS that wait, which are in turn in some namespaces."""
    return [_member(gang, number, namespaces) for gang in range(count) for number in range(MEMBERS)]


def _member(gang: int, number: int, namespaces: int) -> Json:
    """Return a pod of a gang: three are small, one fits no card beside what runs."""
    rng = random.Random(f"gang-{gang}-{number}")
    memory = CARD_MIB - 1_000 - gang if number == MEMBERS - 1 else 1_000 + gang
    made = pod(
        f"gang-{gang}-{number}",
        namespace=f"gangs-{gang % namespaces}",
        uid=f"00000000-0000-0000-{gang:04}-{rng.getrandbits(40):012}",
    )
    made["metadata"] |= {
        "creationTimestamp": STARTED,
        "labels": {NAME_LABELS[0]: f"gang-{gang}", MINIMUM_LABEL: str(MEMBERS)},
    }
    limits = {gpushare.MEMORY: str(memory)}
    made["spec"]["containers"] = [{"name": "c", "resources": {"limits": limits}}]
    reason = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "no"}
    made["status"]["conditions"] = [reason]
    return made


def _pod(
    name: str, limits: Json, rng: random.Random, *, node: str = "", more: list[Json] | None = None
) -> Json:
    namespace = f"team-{rng.randrange(40)}"
    made = pod(name, namespace=namespace, node=node, uid=_uid(rng))
    made["metadata"] |= {
        "creationTimestamp": STARTED,
        "managedFields": _MANAGED,
        "labels": {"app": name, "job-name": name, "controller-uid": _uid(rng)},
        "ownerReferences": [
            {
                "apiVersion": "batch/v1",
                "kind": "Job",
                "name": name,
                "uid": _uid(rng),
                "controller": True,
            }
        ],
    }
    made["spec"] |= {
        "tolerations": _TOLERATIONS,
        "serviceAccountName": "default",
        "containers": [_container(i, each) for i, each in enumerate((limits, *(more or ())))],
        "volumes": [{"name": "token", "projected": {"sources": [{"configMap": {"name": "ca"}}]}}],
    }
    if node:
        running = {"name": "c0", "containerID": f"containerd://{_uid(rng)}", "ready": True}
        ready = {"type": "Ready", "status": "True", "lastTransitionTime": STARTED}
        made["status"] |= {
            "podIP": "10.1.2.3",
            "startTime": STARTED,
            "conditions": [ready],
            "containerStatuses": [running],
        }
    return made


def _container(number: int, limits: Json) -> Json:
    texts = {key: str(value) for key, value in limits.items()}
    return {
        "name": f"c{number}",
        "image": "registry.example.com/team/training:2026.11",
        "command": ["python", "-m", "training", "--config", "/etc/training/config.yaml"],
        "env": [{"name": f"OPTION_{i}", "value": f"value-{i}"} for i in range(12)],
        "resources": {"limits": texts, "requests": texts},
        "volumeMounts": [{"name": "token", "readOnly": True, "mountPath": _SERVICE_ACCOUNT}],
    }


def _uid(rng: random.Random) -> str:
    text = f"{rng.getrandbits(128):032x}"
    return "-".join((text[:8], text[8:12], text[12:16], text[16:20], text[20:]))
