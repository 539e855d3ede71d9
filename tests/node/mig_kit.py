"""A node of the harness whose cards are simulated ones with MIG, and pods with instances of them."""

import asyncio
import contextlib
import tempfile
import uuid
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

from fenka.core.inventory import DeviceId
from fenka.core.request import Placement, Slice
from fenka.dialects import mig_records, pod_records
from fenka.dialects.base import ContainerRequest, PodRequest
from fenka.dialects.mig_records import DividedCard, decode_instances
from fenka.dialects.registry import detect
from fenka.formats.mig_profiles import resource_name
from fenka.hardware import nvml_mig
from fenka.hardware.card_spec import parse_spec
from fenka.hardware.nvml import Driver, Hardware
from fenka.hardware.simulated_node import SimulatedNode
from tests.node.harness import NODE, ContainerFailed, Json, NodeHarness, node_harness
from tests.waiting import WAIT_S, until

MIRRORED = 'version = 1\n[[card]]\nmodel = "A100-40G"\nmig_mirrored = true\n'
ON_DEMAND = {"gpushare": "true", "fenka.io/mig": "on-demand"}


class SimulatedHardware(Hardware):
    """Hardware of a simulated node, whose contexts take no memory."""

    def __init__(self, simulated: SimulatedNode) -> None:
        super().__init__(lambda: Driver.open(simulated.library_dir))
        self.simulated = simulated
        self.cards = self.driver.cards()
        self.context_mib = {card.uuid: 0 for card in self.cards}


@contextlib.contextmanager
def simulated_hardware(spec: str) -> Any:
    """Start a simulated node, and open its driver. spec: of its cards, or `mirrored`."""
    with tempfile.TemporaryDirectory(prefix="fenka-") as folder:
        if spec == "mirrored":
            spec = str(Path(folder) / "mirrored.toml")
            Path(spec).write_text(MIRRORED)
        simulated = SimulatedNode.create(Path(folder) / "node", parse_spec(spec))
        simulated.start()
        hardware = SimulatedHardware(simulated)
        try:
            yield hardware
        finally:
            hardware.close()
            simulated.stop()


@contextlib.asynccontextmanager
async def mig_node(
    library: Path,
    spec: str = "A100-40G",
    *,
    divided: bool = True,
    layouts: Path | None = None,
    **labels: str,
) -> AsyncIterator[NodeHarness]:
    """Run a node that divides its cards on demand, unless it has other labels.

    divided: whether they are in MIG mode already. layouts: a file of them.
    """
    with simulated_hardware(spec) as hardware:
        for card in hardware.cards if divided else ():
            if hardware.driver.geometry(card.uuid):
                nvml_mig.set_mig_mode(card.uuid, enabled=True)
        async with node_harness(
            library=library, labels=labels or ON_DEMAND, hardware=hardware, layouts=layouts
        ) as node:
            if layouts is None and (not labels or "gpushare" in labels):
                await node.ready()
            if divided and not labels:
                await until(lambda: any(card.on_demand for card in published(node)))
            yield node


def published(node: NodeHarness) -> tuple[DividedCard, ...]:
    """Return the Node's divided cards, as the scheduler reads them."""
    annotations: Mapping[str, str] = node.api.objects[f"/api/v1/nodes/{NODE}"]["metadata"][
        "annotations"
    ]
    return decode_instances(annotations)


def states(node: NodeHarness) -> dict[str, str]:
    """Return the states of all instances that the Node shows, by place."""
    return {
        f"{place.start} {place.profile.name}": state
        for card in published(node)
        for place, state in card.instances.items()
    }


def layout(node: NodeHarness, index: int = 0) -> list[str]:
    """Return what exists on a card, as `start profile`."""
    card = node.hardware.cards[index].uuid
    geometry = node.program.instances.geometries[card]
    listed = nvml_mig.instances(card, geometry)
    return sorted(f"{each.start} {each.profile.name}" for each in listed)


def place_id(node: NodeHarness, profile: str, start: int, card: int = 0) -> DeviceId:
    """Return an instance's id."""
    return DeviceId(f"{node.hardware.cards[card].uuid}/{start}/{profile}")


def administrator_creates(node: NodeHarness, profile: str, start: int) -> int:
    """Create an instance as nvidia-smi does, and return its id."""
    card = node.hardware.cards[0].uuid
    described = node.program.instances.geometries[card].by_name[profile]
    gpu = nvml_mig.create_gpu_instance(card, described, start)
    nvml_mig.create_compute_instance(card, gpu)
    return gpu


def administrator_destroys(node: NodeHarness, gpu: int) -> None:
    """Destroy an instance as nvidia-smi does."""
    card = node.hardware.cards[0].uuid
    nvml_mig.destroy_compute_instance(card, gpu, 0)
    nvml_mig.destroy_gpu_instance(card, gpu)


def mig_pod(node: NodeHarness, name: str, *places: DeviceId, namespace: str = "default") -> Json:
    """Create a pod with whole instances at these places, all of one profile, as the scheduler binds it."""
    profile = places[0].rpartition("/")[2]
    pod = node.pod(name, len(places), on=None, resource=resource_name(profile))
    slices = [Slice(0, place, 1, 0) for place in places]
    return _annotated(
        node, pod, {mig_records.INSTANCE: mig_records.encode_places(slices)}, namespace
    )


def inside_pod(
    node: NodeHarness,
    name: str,
    place: DeviceId,
    limits: dict[str, int],
    namespace: str = "default",
) -> Json:
    """Create a pod with a slice inside an instance, as the scheduler binds it."""
    shared = mig_records.with_instances(node.program.inventory.shared_node(), [place])
    (instance,) = (each for each in shared.node.cards if each.uuid == place)
    inside = {mig_records.INSIDE: instance.profile}
    request = PodRequest((ContainerRequest("main", limits),), {}, inside)
    dialect = detect(request)
    assert dialect is not None
    (part,) = dialect.parse(request)
    assert part.request.memory is not None
    mib = part.request.memory.mib_on(instance.memory_mib, node.unit_mib)
    assert mib is not None
    piece = Slice(instance.index, place, mib, part.request.compute)
    annotations = pod_records.encode(dialect, request, shared, [Placement(NODE, (piece,))], 1)
    pod = node.pod(name, 1, on=None)
    pod["spec"]["containers"][0]["resources"]["limits"] = {
        resource: str(amount) for resource, amount in limits.items()
    }
    return _annotated(node, pod, {**request.annotations, **annotations}, namespace)


def _annotated(
    node: NodeHarness, pod: Json, annotations: Mapping[str, str], namespace: str
) -> Json:
    if namespace != "default":
        node.delete(pod)
        pod["metadata"] |= {"namespace": namespace, "uid": str(uuid.uuid4())}
    pod["metadata"]["annotations"] = dict(annotations)
    node.api.put(f"/api/v1/namespaces/{namespace}/pods/{pod['metadata']['name']}", pod)
    return pod


async def started(node: NodeHarness, pod: Json) -> Json:
    """Start the pod's container as the kubelet does, until that works."""
    async with asyncio.timeout(WAIT_S):
        while True:
            try:
                return await node.kubelet.start_container(pod, "main")
            except ContainerFailed:
                node.now += 10
                await asyncio.sleep(0.05)


async def admit(node: NodeHarness, pod: Json) -> None:
    """Have the kubelet allocate for the pod."""
    resources = pod["spec"]["containers"][0]["resources"]["limits"]
    await until(lambda: all(node.kubelet.free(name) for name in resources))
    await node.kubelet.admit(pod, *resources)


async def run(node: NodeHarness, pod: Json) -> Json:
    """Admit the pod, and start its container."""
    await admit(node, pod)
    return await started(node, pod)


def end(node: NodeHarness, pod: Json) -> None:
    """Delete a pod, as its owner does, and let the time pass for which tokens may be unclaimed."""
    node.now += 60
    meta = pod["metadata"]
    node.api.drop(f"/api/v1/namespaces/{meta['namespace']}/pods/{meta['name']}")
    node.kubelet.forget(pod)
    node.program.trigger()
