"""Looks at what runs: which replicas answer, and what the gateway reports. A look takes a second at most."""

import asyncio
import contextlib
from collections import Counter
from collections.abc import Mapping

from prometheus_client.parser import text_string_to_metric_families

from fenka.jobs.ports import LOOPBACK
from fenka.jobs.routing_table import ListenAddress
from fenka.workstation.serving.plan import GatewayUse

TIMEOUT_S = 1.0
MAX_RESPONSE_BYTES = 4 << 20

_PREFIX = "fenka_gateway_"


def answering(paths: Mapping[ListenAddress, str]) -> set[ListenAddress]:
    """Return the addresses where a GET of the path succeeds."""

    async def ask() -> list[bytes | None]:
        return await asyncio.gather(*(_get(address, path) for address, path in paths.items()))

    bodies = asyncio.run(ask()) if paths else []
    return {address for address, body in zip(paths, bodies, strict=True) if body is not None}


def gateway_use(port: int) -> GatewayUse | None:
    """Return what the gateway reports at this port; None if it does not answer."""
    body = asyncio.run(_get(port, "/metrics"))
    with contextlib.suppress(ValueError, UnicodeDecodeError):
        return None if body is None else _parse(body.decode())
    return None


def _parse(text: str) -> GatewayUse:
    """Return what metrics say. Raises ValueError."""
    waiting = 0
    in_flight, responses, terminating = Counter[str](), Counter[str](), Counter[str]()
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            match sample.name.removeprefix(_PREFIX):
                case "requests_waiting":
                    waiting = int(sample.value)
                case "requests_in_flight":
                    in_flight[sample.labels["version"]] += int(sample.value)
                case "responses_total":
                    responses[sample.labels["version"]] += int(sample.value)
                case "terminating_requests":
                    terminating[sample.labels["replica"]] += int(sample.value)
    return GatewayUse(waiting, in_flight, responses, terminating)


async def _get(address: ListenAddress, path: str) -> bytes | None:
    """Return the body of a successful response; None for any other, and if there is none in time."""
    try:
        async with asyncio.timeout(TIMEOUT_S):
            if isinstance(address, str):
                host = "localhost"
                reader, writer = await asyncio.open_unix_connection(address)
            else:
                host = f"{LOOPBACK}:{address}"
                reader, writer = await asyncio.open_connection(LOOPBACK, address)
            try:
                # A response of version 1.0 has no parts, and ends with the connection.
                writer.write(f"GET {path} HTTP/1.0\r\nHost: {host}\r\nAccept: */*\r\n\r\n".encode())
                response = await _read(reader)
            finally:
                writer.close()
    except (OSError, TimeoutError, UnicodeEncodeError):
        return None
    head, separator, body = response.partition(b"\r\n\r\n")
    status = head.split(b" ", 2)[1:2]
    return body if separator and status and status[0][:1] in (b"2", b"3") else None


async def _read(reader: asyncio.StreamReader) -> bytes:
    response = b""
    while len(response) < MAX_RESPONSE_BYTES and (part := await reader.read(1 << 16)):
        response += part
    return response


def ready(replicas: Mapping[str, tuple[ListenAddress, str]]) -> set[str]:
    """Return the names of the replicas that answer, of those whose programs listen.

    Args:
        replicas: Where each listens, and the path that answers when it is ready; empty if listening suffices.
    """
    answers = answering({address: path for address, path in replicas.values() if path})
    return {name for name, (address, path) in replicas.items() if not path or address in answers}
