"""Read the kubelet's PodResources API with a schema of the few fields that are needed.

The fields are from k8s.io/kubelet/pkg/apis/podresources/v1/api.proto.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

_PACKAGE = "fire"
_FIELD = descriptor_pb2.FieldDescriptorProto
_SCHEMA: dict[str, list[tuple[str, int, str, bool]]] = {
    "Devices": [("resource_name", 1, "", False), ("device_ids", 2, "", True)],
    "Container": [("name", 1, "", False), ("devices", 2, "Devices", True)],
    "Pod": [
        ("name", 1, "", False),
        ("namespace", 2, "", False),
        ("containers", 3, "Container", True),
    ],
    "Answer": [("pod_resources", 1, "Pod", True)],
}


@dataclass(frozen=True)
class HeldDevices:
    """The device IDs of one resource that a container holds."""

    namespace: str
    pod: str
    container: str
    resource: str
    ids: tuple[str, ...]


def _answer_class() -> Any:
    file = descriptor_pb2.FileDescriptorProto(name="fire.proto", package=_PACKAGE, syntax="proto3")
    for name, fields in _SCHEMA.items():
        message = file.message_type.add(name=name)
        for field, number, kind, repeated in fields:
            message.field.add(
                name=field,
                number=number,
                type=_FIELD.TYPE_MESSAGE if kind else _FIELD.TYPE_STRING,
                type_name=f".{_PACKAGE}.{kind}" if kind else None,
                label=_FIELD.LABEL_REPEATED if repeated else _FIELD.LABEL_OPTIONAL,
            )
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{_PACKAGE}.Answer"))


_ANSWER = _answer_class()


def held_devices(root: Path) -> Iterator[HeldDevices]:
    """Yield the device IDs of all containers of a node.

    Args:
        root: the node's file system.

    Raises:
        grpc.RpcError: the kubelet does not answer.
    """
    target = f"unix:{root}/var/lib/kubelet/pod-resources/kubelet.sock"
    with grpc.insecure_channel(target) as channel:
        listing: Any = channel.unary_unary(
            "/v1.PodResourcesLister/List",
            request_serializer=lambda _: b"",
            response_deserializer=_ANSWER.FromString,
        )
        answer = listing(None, timeout=10)
    for pod in answer.pod_resources:
        for container in pod.containers:
            # The kubelet may list one entry for each NUMA node or for each ID.
            ids: dict[str, list[str]] = {}
            for devices in container.devices:
                ids.setdefault(devices.resource_name, []).extend(devices.device_ids)
            for resource, held_ids in ids.items():
                yield HeldDevices(
                    pod.namespace, pod.name, container.name, resource, tuple(held_ids)
                )
