"""Serve one CDI device as a device plugin: ``python device_plugin.py RESOURCE CDI-NAME``.

This is the smallest plugin that a kubelet accepts. Its messages are encoded by hand: it tests the cluster, so
it must not depend on the code under test.
"""

import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc

FOLDER = Path("/var/lib/kubelet/device-plugins")
SOCKET = "harness.sock"


def field(number: int, content: bytes | str) -> bytes:
    """Encode a length-delimited field of a protobuf message, shorter than 128 bytes."""
    encoded = content if isinstance(content, bytes) else content.encode()
    assert len(encoded) < 128
    return bytes([number << 3 | 2, len(encoded)]) + encoded


def list_and_watch(_request: bytes, _context: Any) -> Iterator[bytes]:
    """Report one healthy device, then keep the stream open."""
    yield field(1, field(1, "only") + field(2, "Healthy"))
    threading.Event().wait()


def allocate(_request: bytes, _context: Any) -> bytes:
    """Return the name of the CDI device."""
    return field(1, field(5, field(1, sys.argv[2])))


def no_options(_request: bytes, _context: Any) -> bytes:
    """Declare neither preferred allocations nor PreStartContainer."""
    return b""


def main() -> None:
    """Serve, then register."""
    (FOLDER / SOCKET).unlink(missing_ok=True)
    server = grpc.server(ThreadPoolExecutor(4))
    handlers: dict[str, Any] = {
        "ListAndWatch": grpc.unary_stream_rpc_method_handler(list_and_watch),
        "Allocate": grpc.unary_unary_rpc_method_handler(allocate),
        "GetDevicePluginOptions": grpc.unary_unary_rpc_method_handler(no_options),
    }
    service = grpc.method_handlers_generic_handler("v1beta1.DevicePlugin", handlers)
    server.add_generic_rpc_handlers((service,))
    server.add_insecure_port(f"unix://{FOLDER}/{SOCKET}")
    server.start()
    with grpc.insecure_channel(f"unix://{FOLDER}/kubelet.sock") as kubelet:
        register: Any = kubelet.unary_unary("/v1beta1.Registration/Register")
        register(field(1, "v1beta1") + field(2, SOCKET) + field(3, sys.argv[1]), timeout=5)
    server.wait_for_termination()


if __name__ == "__main__":
    main()
