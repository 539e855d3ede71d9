"""Placed pods of all dialects, with the annotations that record their placements.

    python -m tests.skew.pods > tests/skew/pods-VERSION.json

writes the annotations of this tree. The file of the last release is committed, and is never written again.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec

from fenka.core.request import Placement
from fenka.dialects import mig_records, pod_records
from fenka.dialects.base import CORE_MODE, PodRequest, SharedNode
from fenka.dialects.registry import WITH_HAMI, detect
from tests.dialects.builders import V100_MIB, pod, share
from tests.dialects.mig_builders import divided_node, placed

MEM, CORE = "aliyun.com/gpu-mem", "aliyun.com/gpu-core.percentage"
VCORE, VMEM = "tencent.com/vcuda-core", "tencent.com/vcuda-memory"
GPU, GPUMEM, GPUCORES = "nvidia.com/gpu", "nvidia.com/gpumem", "nvidia.com/gpucores"

CARDS = share(V100_MIB, V100_MIB, V100_MIB)
TENCENT = share(V100_MIB, V100_MIB, V100_MIB, unit_mib=256)
NOW_NS = 1_700_000_000_000_000_000

PODS: dict[str, tuple[PodRequest, SharedNode]] = {
    "gpushare, one container": (pod({MEM: 4}), CARDS),
    "gpushare, two containers": (pod({MEM: 4}, {MEM: 6}), CARDS),
    "ACK, compute": (pod({MEM: 4, CORE: 30}), CARDS),
    "ACK, two cards": (pod({MEM: 8}, labels={"aliyun.com/gpu-count": "2"}), CARDS),
    "gpu-manager, a slice": (pod({VCORE: 30, VMEM: 12}), TENCENT),
    "gpu-manager, two cards": (pod({VCORE: 200}), TENCENT),
    "HAMi": (pod({GPU: 2, GPUMEM: 3000, GPUCORES: 30}), CARDS),
    "whole cards": (pod({GPU: 2}), CARDS),
    "a weight": (pod({MEM: 4, CORE: 30}, annotations={CORE_MODE: "weight"}), CARDS),
    "inside an instance": (
        pod({MEM: 2}, annotations={mig_records.INSIDE: "mig"}),
        divided_node(1),
    ),
    "an instance": (pod({"nvidia.com/mig-1g.10gb": 1}), divided_node(1)),
}


def annotations(
    request: PodRequest, shared: SharedNode, placements: Sequence[Placement]
) -> dict[str, str]:
    """Return what is written on the pod when it is bound."""
    dialect = detect(request, WITH_HAMI)
    assert dialect is not None
    return pod_records.encode(dialect, request, shared, placements, NOW_NS)


def read_annotations(version: str) -> dict[str, dict[str, str]]:
    """Return the annotations of a release, by the names of PODS."""
    text = Path(__file__).with_name(f"pods-{version}.json").read_bytes()
    return msgspec.json.decode(text, type=dict[str, dict[str, str]])


if __name__ == "__main__":
    written = {name: annotations(*case, placed(*case) or ()) for name, case in PODS.items()}
    sys.stdout.write(msgspec.json.format(msgspec.json.encode(written), indent=1).decode() + "\n")
