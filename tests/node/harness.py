"""A fake kubelet with state, and the node program on it and on the fake API server."""

import asyncio
import base64
import contextlib
import errno
import json
import shutil
import tempfile
import uuid
from collections import defaultdict
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import grpc.aio

from fenka.core.gangs import place_gang
from fenka.core.inventory import Card, DeviceId, Links
from fenka.core.inventory import Node as CoreNode
from fenka.core.reasons import Unschedulable
from fenka.core.request import Placement, Slice
from fenka.core.units import units_to_mib
from fenka.core.usage import UsageTotals
from fenka.dialects import gpushare
from fenka.dialects.base import ContainerRequest, ContainerUnits, Dialect, PodRequest, SharedNode
from fenka.dialects.registry import DIALECTS, WITH_HAMI, detect
from fenka.hardware.nvml import Reading
from fenka.isolation.lease_files import install_native
from fenka.mig.keeper import InstanceKeeper
from fenka.mig.manager import InstanceManager, geometries
from fenka.node.advertiser import Advertised
from fenka.node.inventory import CardHealth
from fenka.node.kubelet import messages_pb2 as api
from fenka.node.kubelet.client import HEALTHY, Kubelet
from fenka.node.kubelet.relay import Relay
from fenka.node.lease import files
from fenka.node.lease.files import LeaseFiles
from fenka.node.lease.store import LeaseStore
from fenka.node.mig_instances import NodeInstances
from fenka.node.node_api import NodeApi
from fenka.node.program import Agent, Edges, Program, assemble
from fenka.server.pod_spans import PodSpans
from tests.fakes.in_process import FakeApi
from tests.waiting import WAIT_S, until

NODE = "n1"
T4_MIB = 15079
Json = dict[str, Any]


class ContainerFailed(Exception):
    """The container did not start. The message is the one that the user sees."""


class AdmissionFailed(Exception):
    """The kubelet rejected the pod (UnexpectedAdmissionError)."""


@dataclass
class _Entry:
    uid: str
    namespace: str
    pod: str
    container: str
    init: bool
    resource: str
    ids: list[str]
    answer: bytes


@dataclass
class FakeKubelet:
    """The kubelet's device manager, as in its source code, and a container runtime that resolves CDI."""

    root: Path
    cdi: Path
    entries: list[_Entry] = field(default_factory=list)
    devices: dict[str, dict[str, str]] = field(default_factory=dict)
    endpoints: dict[str, str] = field(default_factory=dict)
    pre_start: dict[str, bool] = field(default_factory=dict)
    checkpoint: bool = True
    hide_answers: bool = False
    _server: Any = None
    _lists: list["asyncio.Task[None]"] = field(default_factory=list)

    @property
    def plugins(self) -> Path:
        """Directory of the plugins' sockets."""
        return self.root / "device-plugins"

    @property
    def pod_resources(self) -> Path:
        """The socket of PodResources."""
        return self.root / "pr.sock"

    async def start(self) -> None:
        """Empty the plugins' directory, as the real one does, and listen."""
        shutil.rmtree(self.plugins, ignore_errors=True)
        self.plugins.mkdir(parents=True)
        self._write_checkpoint()
        self.endpoints, self.devices = {}, {}
        self._server = grpc.aio.server()

        def unary(method: Any, kind: Any) -> Any:
            return grpc.unary_unary_rpc_method_handler(
                method, kind.FromString, lambda message: message.SerializeToString()
            )

        self._server.add_generic_rpc_handlers(
            (
                grpc.method_handlers_generic_handler(
                    "v1beta1.Registration", {"Register": unary(self._register, api.RegisterRequest)}
                ),
                grpc.method_handlers_generic_handler(
                    "v1.PodResourcesLister",
                    {"List": unary(self._list, api.ListPodResourcesRequest)},
                ),
            )
        )
        self._server.add_insecure_port(f"unix://{self.plugins / 'kubelet.sock'}")
        self._server.add_insecure_port(f"unix://{self.pod_resources}")
        await self._server.start()

    async def stop(self) -> None:
        """Stop; the checkpoint stays."""
        for task in self._lists:
            task.cancel()
        await asyncio.gather(*self._lists, return_exceptions=True)
        self._lists.clear()
        await self._server.stop(grace=None)

    async def restart(self) -> None:
        """Stop and start again."""
        await self.stop()
        await self.start()

    async def _register(self, request: Any, _: Any) -> Any:
        assert request.version == "v1beta1"
        self.pre_start[request.resource_name] = request.options.pre_start_required
        self.endpoints[request.resource_name] = request.endpoint
        self._lists.append(asyncio.create_task(self._follow(request.resource_name)))
        return api.Empty()

    async def _follow(self, resource: str) -> None:
        endpoint = self.endpoints[resource]
        with contextlib.suppress(grpc.aio.AioRpcError):
            async with self._channel(resource) as channel:
                stream = channel.unary_stream(
                    "/v1beta1.DevicePlugin/ListAndWatch",
                    request_serializer=lambda message: message.SerializeToString(),
                    response_deserializer=api.ListAndWatchResponse.FromString,
                )
                async for answer in stream(api.Empty()):
                    self.devices[resource] = {device.ID: device.health for device in answer.devices}
        if self.endpoints.get(resource) == endpoint:
            # A plugin whose stream has ended has no healthy devices (`markResourceUnhealthy`).
            self.devices[resource] = {}

    def _channel(self, resource: str) -> Any:
        return grpc.aio.insecure_channel(f"unix://{self.plugins / self.endpoints[resource]}")

    async def _ask(self, resource: str, method: str, request: Any, kind: Any) -> Any:
        async with self._channel(resource) as channel:
            call = channel.unary_unary(
                f"/v1beta1.DevicePlugin/{method}",
                request_serializer=lambda message: message.SerializeToString(),
                response_deserializer=kind.FromString,
            )
            return await call(request, timeout=WAIT_S)

    async def _list(self, _: Any, __: Any) -> Any:
        pods: dict[tuple[str, str], Any] = {}
        for entry in self.entries:
            if entry.init:
                continue
            pod = pods.setdefault(
                (entry.namespace, entry.pod),
                api.PodResources(namespace=entry.namespace, name=entry.pod),
            )
            pod.containers.append(
                api.ContainerResources(
                    name=entry.container,
                    devices=[
                        api.ContainerDevices(resource_name=entry.resource, device_ids=entry.ids)
                    ],
                )
            )
        return api.ListPodResourcesResponse(pod_resources=list(pods.values()))

    def _write_checkpoint(self) -> None:
        if not self.checkpoint:
            return
        entries = [
            {
                "PodUID": entry.uid,
                "ContainerName": entry.container,
                "ResourceName": entry.resource,
                "DeviceIDs": {"-1": entry.ids},
                "AllocResp": "" if self.hide_answers else base64.b64encode(entry.answer).decode(),
            }
            for entry in self.entries
        ]
        data = {"Data": {"PodDeviceEntries": entries, "RegisteredDevices": {}}, "Checksum": 1}
        (self.plugins / "kubelet_internal_checkpoint").write_text(json.dumps(data))

    def free(self, resource: str = gpushare.MEMORY) -> list[str]:
        """Return the healthy IDs that no container holds."""
        taken = {
            device for entry in self.entries if entry.resource == resource for device in entry.ids
        }
        return [
            device
            for device, health in self.devices.get(resource, {}).items()
            if health == HEALTHY and device not in taken
        ]

    async def admit(self, pod: Json, *more: str) -> None:
        """Allocate for all containers, one resource after the other."""
        for resource in more or (gpushare.MEMORY,):
            await self._allocate(pod, resource)

    async def _allocate(self, pod: Json, resource: str) -> None:
        """Allocate one resource. App containers reuse the IDs of init containers."""
        meta, spec = pod["metadata"], pod["spec"]
        reusable: list[str] = []
        for init, container in [
            *((True, container) for container in spec.get("initContainers", ())),
            *((False, container) for container in spec["containers"]),
        ]:
            wanted = int(container["resources"]["limits"].get(resource, 0))
            if not wanted:
                continue
            ids = [
                *reusable,
                *(device for device in self.free(resource) if device not in reusable),
            ][:wanted]
            if len(ids) < wanted:
                raise AdmissionFailed(f"requested {wanted}, available {len(ids)}")
            request = api.AllocateRequest(
                container_requests=[api.ContainerAllocateRequest(devices_ids=ids[::-1])]
            )
            answer = await self._ask(resource, "Allocate", request, api.AllocateResponse)
            stays = container.get("restartPolicy") == "Always"
            self.entries.append(
                _Entry(
                    meta["uid"],
                    meta["namespace"],
                    meta["name"],
                    container["name"],
                    init and not stays,
                    resource,
                    ids,
                    answer.container_responses[0].SerializeToString(),
                )
            )
            reusable = sorted({*reusable, *ids}) if init else [x for x in reusable if x not in ids]
        self._write_checkpoint()

    async def start_container(self, pod: Json, name: str) -> Json:
        """Call PreStartContainer, then return the container's edits as the runtime resolves them."""
        entries = [
            entry
            for entry in self.entries
            if (entry.uid, entry.container) == (pod["metadata"]["uid"], name)
        ]
        for entry in entries:
            if entry.resource not in self.endpoints or not self.pre_start[entry.resource]:
                continue
            request = api.PreStartContainerRequest(devices_ids=entry.ids)
            try:
                await self._ask(
                    entry.resource, "PreStartContainer", request, api.PreStartContainerResponse
                )
            except grpc.aio.AioRpcError as why:
                raise ContainerFailed(why.details()) from None
        answer = api.ContainerAllocateResponse()
        for entry in entries:
            answer.MergeFromString(entry.answer)
        assert len(answer.cdi_devices) == 1
        kind, _, device = answer.cdi_devices[0].name.partition("=")
        for path in self.cdi.glob("*.json"):
            spec = json.loads(path.read_text())
            for described in spec["devices"]:
                if (spec["kind"], described["name"]) == (kind, device):
                    return self._edited(answer, described["containerEdits"])
        raise ContainerFailed(f"unresolvable CDI devices {kind}={device}")

    @staticmethod
    def _edited(answer: Any, edits: Json) -> Json:
        environment = {**answer.envs, **dict(line.split("=", 1) for line in edits["env"])}
        for mount in edits["mounts"]:
            assert Path(mount["hostPath"]).exists(), mount
        return {
            "env": environment,
            "mounts": {mount["containerPath"]: mount["hostPath"] for mount in edits["mounts"]},
            "devices": [device["path"] for device in edits.get("deviceNodes", ())],
        }

    def forget(self, pod: Json) -> None:
        """Forget a pod that has ended."""
        self.entries = [entry for entry in self.entries if entry.uid != pod["metadata"]["uid"]]
        self._write_checkpoint()


@dataclass
class FakeDriver:
    """A driver that shows cards."""

    shown: tuple[Card, ...]

    def cards(self) -> tuple[Card, ...]:
        """Stand in for `Driver.cards`."""
        return self.shown

    def links(self) -> Links | None:
        """Stand in for `Driver.links`: the cards 0 and 1, 2 and 3, … are pairs."""
        uuids = [card.uuid for card in self.shown]
        pairs = [(one, other) for one in range(len(uuids)) for other in range(len(uuids))]
        rows = bytes(
            0 if one == other else 1 if one // 2 == other // 2 else 6 for one, other in pairs
        )
        return Links(tuple(uuids), rows) if len(uuids) > 1 else None

    def geometry(self, _: str) -> None:
        """Stand in for `Driver.geometry`, of cards without MIG."""


@dataclass
class FakeHardware:
    """Hardware without a driver."""

    cards: tuple[Card, ...]
    lost: set[str] = field(default_factory=set)

    @property
    def driver(self) -> "FakeDriver":
        """Stand in for `Hardware.driver`."""
        return FakeDriver(self.cards)

    def readings(self) -> Any:
        """Stand in for `Hardware.readings`."""
        return {
            card.uuid: Reading(card.uuid, 0, 0, 40, 10.0)
            for card in self.cards
            if card.uuid not in self.lost
        }


def card(index: int, memory_mib: int = T4_MIB) -> Card:
    """Return a T4, or a card with this memory."""
    return Card(index, DeviceId(f"GPU-{uuid.UUID(int=index + 1)}"), "Tesla T4", memory_mib)


@dataclass
class NodeHarness:
    """A node: its kubelet, its API server, and its program."""

    root: Path
    api: FakeApi
    kubelet: FakeKubelet
    hardware: FakeHardware
    library: Path
    unit_mib: int = 1024
    labelled_only: bool = False
    taint: bool = True
    dialects: tuple[Dialect, ...] = DIALECTS
    layouts: Path | None = None
    living: set[str] = field(default_factory=set)
    kills: bool = False
    placed: UsageTotals = field(default_factory=UsageTotals)
    now: float = 1e9
    spans: PodSpans | None = None
    relayed: bool = False
    program: Program = field(init=False)
    node_api: NodeApi = field(init=False)
    health: CardHealth = field(init=False)
    store: LeaseStore = field(init=False)
    lease_files: LeaseFiles = field(init=False)
    _tasks: list["asyncio.Task[Any]"] = field(default_factory=list)
    _relay: "asyncio.Task[None] | None" = None

    @property
    def agent(self) -> Agent:
        """The program's control loop."""
        return self.program.agent

    def _instances(self) -> NodeInstances:
        hardware: Any = self.hardware
        capable = geometries(hardware, self.hardware.cards)
        keeper = InstanceKeeper(self.root / "instances.json", "boot", capable)
        pci_ids = {uuid: hardware.driver.pci_device(uuid) for uuid in capable}
        manager = InstanceManager(hardware, keeper, pci_ids=pci_ids)
        return NodeInstances(manager, lambda: self.health.known)

    async def start(self) -> None:
        """Start the program as after a crash: from what is on disk."""
        self.store = LeaseStore(self.root / "state", clock=lambda: self.now)
        self.store.load()
        self.lease_files = lease_files(self.root, self.library)
        self.lease_files.prepare()
        self.node_api = NodeApi(self.api, NODE)  # type: ignore[arg-type]
        self.health = CardHealth(self.hardware)  # type: ignore[arg-type]
        plugins = self.relay_directory if self.relayed else self.kubelet.plugins
        kubelet = Kubelet(plugins, self.kubelet.pod_resources, self.kubelet.plugins)
        self.program = assemble(
            Edges(
                self.node_api,
                kubelet,
                self.health,
                self.store,
                self.lease_files,
                self._instances(),
                self.unit_mib,
                Advertised(
                    labelled_only=self.labelled_only, dialects=self.dialects, taint=self.taint
                ),
                self.layouts,
                lambda: self.living,
                self.kill_pods,
                lambda: self.now,
                self.spans,
            ),
        )
        running = (plugin.run() for plugin in self.program.plugins.values())
        work = (self.agent.run(), self.node_api.run(), *running, self.program.instances.run())
        self._tasks = [asyncio.create_task(coroutine) for coroutine in work]
        await until(lambda: self.node_api.synced)

    async def end_passes(self) -> None:
        """End the control loop, so that only the test's own passes run."""
        passes = self._tasks[0]
        passes.cancel()
        await asyncio.wait([passes])

    def kill_pods(self, uids: Collection[str]) -> int:
        """Stand in for `pod_processes.kill_pods`."""
        killed = self.living & set(uids) if self.kills else set()
        self.living -= killed
        return len(killed)

    async def kill(self) -> None:
        """End the program as SIGKILL does."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if not self.relayed:
            self.kubelet.devices.clear()

    @property
    def relay_directory(self) -> Path:
        """Where the program registers with the relay."""
        return self.root / "relay"

    async def start_relay(self) -> None:
        """Start the relay, as its container does."""

        async def issue(resource: str, ids: Sequence[str]) -> str:
            return LeaseStore(self.root / "state", clock=lambda: self.now).issue(resource, ids).name

        self.relay_directory.mkdir(exist_ok=True)
        kubelet = Kubelet(self.kubelet.plugins, self.kubelet.pod_resources)
        self._relay = asyncio.create_task(Relay(kubelet, self.relay_directory, issue).run())
        await until((self.relay_directory / "kubelet.sock").exists)

    async def kill_relay(self) -> None:
        """End the relay as SIGKILL does."""
        if self._relay is not None:
            self._relay.cancel()
            await asyncio.wait([self._relay])

    async def ready(self, resource: str = gpushare.MEMORY) -> None:
        """Wait until the kubelet has devices of a resource."""
        await until(lambda: self.kubelet.devices.get(resource))

    def node(self, **labels: str) -> None:
        """Create the Node with labels."""
        self.api.put(
            f"/api/v1/nodes/{NODE}",
            {
                "metadata": {"name": NODE, "uid": "node-uid", "labels": labels, "annotations": {}},
                "status": {"capacity": {}, "allocatable": {}},
            },
        )

    def label(self, **labels: str) -> None:
        """Replace the Node's labels."""
        path = f"/api/v1/nodes/{NODE}"
        old = self.api.objects[path]
        self.api.put(path, {**old, "metadata": {**old["metadata"], "labels": labels}})

    def annotate(self, **annotations: str) -> None:
        """Add annotations to the Node."""
        path = f"/api/v1/nodes/{NODE}"
        old = self.api.objects[path]
        meta = {**old["metadata"], "annotations": {**old["metadata"]["annotations"], **annotations}}
        self.api.put(path, {**old, "metadata": meta})

    def pod(
        self,
        name: str,
        units: Mapping[str, int] | int,
        on: int | tuple[int, ...] | None = 0,
        init: Mapping[str, int] | None = None,
        resource: str = gpushare.MEMORY,
        **spec: Any,
    ) -> Json:
        """Create a pod on this node, placed on a card; None: without a record."""
        apps = {"main": units} if isinstance(units, int) else dict(units)
        asks = [ContainerUnits(at, number) for at, number in apps.items()]
        peak = max(sum(apps.values()), *(init or {"": 0}).values())
        annotations: dict[str, str] = {}
        if on is not None and resource == gpushare.MEMORY:
            places = (on,) if isinstance(on, int) else on
            cards = {card.index: card for card in self.hardware.cards}
            share = SharedNode(CoreNode(NODE, self.hardware.cards, unit_mib=self.unit_mib))
            slices = tuple(
                Slice(
                    at,
                    cards[at].uuid,
                    units_to_mib(peak // len(places), cards[at].memory_mib, self.unit_mib),
                    0,
                )
                for at in places
            )
            annotations = gpushare.encode_placement(share, Placement(NODE, slices), asks, 1)

        def container(at: str, number: int) -> Json:
            return {"name": at, "resources": {"limits": {resource: str(number)}}}

        pod = {
            "metadata": {
                "name": name,
                "namespace": "default",
                "uid": str(uuid.uuid4()),
                "annotations": annotations,
            },
            "spec": {
                "nodeName": NODE,
                "schedulerName": "default-scheduler",
                "containers": [container(*item) for item in apps.items()],
                "initContainers": [container(*item) for item in (init or {}).items()],
                **spec,
            },
            "status": {"phase": "Pending"},
        }
        self.api.put(f"/api/v1/namespaces/default/pods/{name}", pod)
        return pod

    def delete(self, pod: Json) -> None:
        """Delete a pod from the API server."""
        self.api.drop(f"/api/v1/namespaces/default/pods/{pod['metadata']['name']}")

    def asking(
        self, name: str, *limits: Mapping[str, int], annotations: Mapping[str, str] | None = None
    ) -> Json:
        """Create a pod of containers c0, c1, … with these limits, placed as by the scheduler."""
        asks = [
            ContainerRequest(f"c{number}", resources) for number, resources in enumerate(limits)
        ]
        manifest = PodRequest(tuple(asks), {}, annotations or {})
        dialect = detect(manifest, tuple(dict.fromkeys((*WITH_HAMI, *self.dialects))))
        assert dialect is not None
        share = SharedNode(CoreNode(NODE, self.hardware.cards, unit_mib=self.unit_mib))
        requests = [part.request for part in dialect.parse(manifest)]
        placements = place_gang(self.placed, requests, "binpack", (share.node,))
        assert not isinstance(placements, Unschedulable)
        for placement in placements:
            self.placed.add(placement)
        pod = self.pod(name, 1, on=None)
        pod["metadata"]["annotations"] = {
            **(annotations or {}),
            **dialect.encode(manifest, share, placements, 1),
        }
        pod["spec"]["containers"] = [
            {
                "name": ask.name,
                "resources": {"limits": {n: str(v) for n, v in ask.resources.items()}},
            }
            for ask in asks
        ]
        self.api.put(f"/api/v1/namespaces/default/pods/{name}", pod)
        return pod

    async def run(self, pod: Json, *resources: str) -> Json:
        """Admit the pod and start its first app container."""
        await self.kubelet.admit(pod, *resources)
        return await self.kubelet.start_container(pod, pod["spec"]["containers"][0]["name"])

    def files(self) -> list[str]:
        """Return the names of all files of leases."""
        paths = [*(self.root / "leases").iterdir(), *(self.root / "cdi").iterdir()]
        return sorted(path.name for path in paths)


def lease_files(
    root: Path, library: Path = Path("/nowhere"), contexts_mib: Mapping[str, int] | None = None
) -> LeaseFiles:
    """Return the leases' files below a directory, without mounts."""
    driver = files.simulated_edits(library, root / "node")
    paths = root / "leases", root / "cdi", library
    return LeaseFiles(
        *(*paths, contexts_mib or {}, lambda _: driver, lambda *_: None, _nothing_mounted),
        near_cpus=defaultdict(lambda: {0, 1, 2, 5}),
    )


def _nothing_mounted(_: Path) -> None:
    raise OSError(errno.EINVAL, "nothing is mounted there")


@contextlib.asynccontextmanager
async def node_harness(
    *cards: Card,
    library: Path,
    labels: Mapping[str, str] | None = None,
    hardware: Any = None,
    layouts: Path | None = None,
    labelled_only: bool = False,
    taint: bool = True,
    relayed: bool = False,
) -> AsyncIterator[NodeHarness]:
    """Run a node that shares its cards, unless its labels say otherwise. hardware: in place of the cards."""
    # A socket's path is short: pytest's own folders are too deep.
    with tempfile.TemporaryDirectory(prefix="fenka-") as folder:
        root = Path(folder)
        (root / "node").mkdir()
        kubelet = FakeKubelet(root, root / "cdi")
        await kubelet.start()
        hardware = hardware or FakeHardware(cards or (card(0),))
        made = NodeHarness(root, FakeApi(), kubelet, hardware, library, layouts=layouts)
        made.labelled_only, made.taint, made.relayed = labelled_only, taint, relayed
        made.node(**(labels or {"gpushare": "true"}))
        if relayed:
            await made.start_relay()
        await made.start()
        try:
            yield made
        finally:
            await made.kill()
            await made.kill_relay()
            await kubelet.stop()


def installed(target: Path) -> Path:
    """Install the native libraries, prepared for leases."""
    return install_native(target / "lib", files.prepare_library)
