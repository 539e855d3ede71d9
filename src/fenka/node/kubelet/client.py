"""The kubelet's sockets and its checkpoint: registers plugins, and reads which containers hold device IDs.

The kubelet names no pod when it allocates. Afterwards there are two sources. PodResources, its public API,
has neither UIDs nor init containers. The checkpoint, an internal file, has both, and even repeats the
plugin's answers. The checkpoint takes precedence where it can be read.
"""

import base64
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import msgspec
from google.protobuf.message import DecodeError, Message

from fenka.core.errors import FenkaError
from fenka.isolation.lease_files import decode_json
from fenka.node.kubelet import messages_pb2 as api

API_VERSION = "v1beta1"
MESSAGE_BYTES = 4 << 20
"""Size of the longest message that the kubelet reads."""

HEALTHY, UNHEALTHY = "Healthy", "Unhealthy"
PLUGINS = Path("/var/lib/kubelet/device-plugins")
"""The kubelet's directory of plugins, at the same path in fenka's containers."""
LEASE_KIND = "fenka.io/lease"
"""CDI kind of leases. Its devices are tokens."""

_TIMEOUT_S = 5.0
_UNLIMITED = [("grpc.max_receive_message_length", -1), ("grpc.enable_http_proxy", 0)]


class KubeletUnavailable(FenkaError):
    """The kubelet does not answer on a socket. The message names the socket and the reason."""


@dataclass(frozen=True, slots=True)
class Claim:
    """A container that holds device IDs of a resource. Fields that a source does not have are empty."""

    resource: str
    ids: frozenset[str]
    container: str
    namespace: str = ""
    pod: str = ""
    uid: str = ""
    token: str = ""


class Kubelet:
    """This node's kubelet, which may be unavailable or restart at any time.

    plugins: the directory in which plugins register, the kubelet's or the relay's. state: the kubelet's
    directory of plugins, which has its checkpoint, if `plugins` is the relay's.
    """

    def __init__(self, plugins: Path, pod_resources: Path, state: Path | None = None) -> None:
        self.plugins, self.pod_resources = plugins, pod_resources
        self._checkpoint = (state or plugins) / "kubelet_internal_checkpoint"

    @property
    def socket(self) -> Path:
        """The socket on which plugins register."""
        return self.plugins / "kubelet.sock"

    async def register(
        self, endpoint: str, resource: str, options: api.DevicePluginOptions
    ) -> None:
        """Register a socket as the plugin of a resource. Raises KubeletUnavailable."""
        request = api.RegisterRequest(
            version=API_VERSION,
            endpoint=endpoint,
            resource_name=resource,
            options=options,
        )
        await _call(self.socket, "/v1beta1.Registration/Register", request, api.Empty)

    async def claims(self) -> list[Claim]:
        """Return the claims of both sources. Raises KubeletUnavailable."""
        answer = await _call(
            self.pod_resources,
            "/v1.PodResourcesLister/List",
            api.ListPodResourcesRequest(),
            api.ListPodResourcesResponse,
        )
        listed = [
            Claim(resource, frozenset(ids), container.name, pod.namespace, pod.name)
            for pod in answer.pod_resources
            for container in pod.containers
            for resource, ids in _by_resource(container.devices).items()
        ]
        return [*read_checkpoint(self._checkpoint), *listed]


def _by_resource(devices: Sequence[Any]) -> dict[str, set[str]]:
    """Merge the devices of a resource, which the kubelet lists once for each NUMA node."""
    ids: dict[str, set[str]] = {}
    for part in devices:
        ids.setdefault(part.resource_name, set()).update(part.device_ids)
    return ids


async def _call(socket: Path, method: str, request: Message, kind: type[Any]) -> Any:
    try:
        return await call(socket, method, request, kind, _TIMEOUT_S)
    except grpc.aio.AioRpcError as error:
        raise KubeletUnavailable(
            f"the kubelet does not answer on {socket}: {error.details()}"
        ) from None


async def call(
    socket: Path, method: str, request: Message, kind: type[Any], timeout_s: float
) -> Any:
    """Return the answer to one call on a Unix socket. Raises AioRpcError."""
    async with channel(socket) as connection:
        method_call = connection.unary_unary(
            method,
            request_serializer=serialize,
            response_deserializer=kind.FromString,
        )
        return await method_call(request, timeout=timeout_s)


def channel(socket: Path) -> grpc.aio.Channel:
    """Return a channel to a Unix socket, for messages of any size."""
    return grpc.aio.insecure_channel(f"unix://{socket}", options=_UNLIMITED)


async def device_lists(socket: Path) -> AsyncIterator[list[tuple[str, bool]]]:
    """Yield a plugin's device lists: IDs, each with whether it is healthy. Raises AioRpcError."""
    async with channel(socket) as connection:
        stream = connection.unary_stream(
            "/v1beta1.DevicePlugin/ListAndWatch",
            request_serializer=serialize,
            response_deserializer=api.ListAndWatchResponse.FromString,
        )
        async for answer in stream(api.Empty()):
            yield [(device.ID, device.health == HEALTHY) for device in answer.devices]


def serialize(message: Message) -> bytes:
    """Return a message's bytes, for gRPC."""
    return message.SerializeToString()


# ---- the checkpoint ----


class _DeviceEntry(msgspec.Struct):
    uid: str = msgspec.field(name="PodUID")
    container: str = msgspec.field(name="ContainerName")
    resource: str = msgspec.field(name="ResourceName")
    ids: dict[str, list[str] | None] = msgspec.field(name="DeviceIDs")
    answer: str = msgspec.field(name="AllocResp", default="")


class _Data(msgspec.Struct):
    entries: list[_DeviceEntry] | None = msgspec.field(name="PodDeviceEntries", default=None)


class _Checkpoint(msgspec.Struct):
    data: _Data = msgspec.field(name="Data")


_checkpoints = msgspec.json.Decoder(_Checkpoint)


def read_checkpoint(path: Path) -> list[Claim]:
    """Return the claims of the checkpoint; none if the file's internal format is not understood."""
    try:
        entries = decode_json(_checkpoints, path.read_bytes()).data.entries or []
    except (OSError, msgspec.DecodeError):
        return []
    return [
        Claim(
            entry.resource,
            frozenset(device for ids in entry.ids.values() for device in ids or ()),
            entry.container,
            uid=entry.uid,
            token=_token(entry.answer),
        )
        for entry in entries
    ]


def _token(answer: str) -> str:
    try:
        return token_of(api.ContainerAllocateResponse.FromString(base64.b64decode(answer)))
    except (DecodeError, ValueError):
        return ""


def token_of(answer: api.ContainerAllocateResponse) -> str:
    """Return the token that a plugin's answer names, or an empty string."""
    for device in answer.cdi_devices:
        kind, _, token = device.name.partition("=")
        if kind == LEASE_KIND:
            return token
    return ""


# ---- the size of a device list ----


def unit_id(number: int) -> str:
    """Return the ID of a unit. It is short, since there may be a hundred thousand."""
    return f"u{number}"


def listing(devices: Sequence[tuple[str, bool]]) -> api.ListAndWatchResponse:
    """Return the message for a list of IDs, each with whether it is healthy."""
    return api.ListAndWatchResponse(
        devices=[
            api.Device(ID=device, health=HEALTHY if healthy else UNHEALTHY)
            for device, healthy in devices
        ]
    )


def largest_bytes(units: int) -> int:
    """Return the size of the message that lists so many units, all of them unhealthy."""
    total, first, digits = 0, 0, 1
    while first < units:
        last = min(10**digits, units)
        total += (last - first) * _entry_bytes(unit_id(first))
        first, digits = last, digits + 1
    return total


def _entry_bytes(device: str) -> int:
    return listing([(device, False)]).ByteSize()


def fitting_unit(unit_mib: int, units_with: Callable[[int], int]) -> int:
    """Return the smallest unit, doubled from `unit_mib`, whose units fit into a message.

    units_with: returns how many units the node has of a unit.
    """
    while largest_bytes(units_with(unit_mib)) > MESSAGE_BYTES:
        unit_mib *= 2
    return unit_mib
