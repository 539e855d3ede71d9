"""Publishes when the cloud takes this machine back, as its metadata service says, in annotations of the Node.

Pods are evicted by the autoscaler's leader, which reads the annotation; a person may write it too. This
program changes only what a service said before.
"""

import asyncio
import contextlib
import ipaddress
import logging
import re
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from fenka.cluster.autoscaling import CAPACITY, RECLAIM_AT, RECLAIM_SOURCE, decode_time, encode_time
from fenka.core.errors import INVALID_INPUT, FenkaError
from fenka.dialects.base import InvalidRecord
from fenka.hardware.card_lock import call_inside
from fenka.kubernetes.api_client import ApiError, ApiUnreachable
from fenka.node.config import SpotNotices
from fenka.node.node_api import NodeApi

TIMEOUT_S = 2.0
"""From connecting to the last byte of an answer."""
MAX_HEAD, MAX_BODY = 8192, 4096

_TOKEN_LIFE_S = 21600
"""The longest that both clouds grant."""
_STATUS = re.compile(rb"HTTP/1\.[01] ([0-9]{3})(?: [^\r\n]*)?\r\n")
_LENGTH = re.compile(rb"(?i)\r\ncontent-length:[ \t]*([0-9]{1,9})[ \t]*\r\n")
_TOKEN = re.compile(rb"[!-~]{1,1024}")
_ADDRESS = re.compile(r"(?P<host>[0-9.]+|\[[0-9a-f:.]+\])(?::(?P<port>[1-9][0-9]{0,4}))?")
_PORT = 80


class InvalidAddress(FenkaError):
    """An address of a metadata service that is none."""

    exit_code = INVALID_INPUT


class MetadataUnavailable(FenkaError):
    """The service has not answered, or with something else. The message says what."""


@dataclass(frozen=True, slots=True)
class MetadataService:
    """A cloud's metadata service.

    Attributes:
        name: the cloud's.
        header: of requests, with the token.
        path: of the notice.
        decode: reads the notice. Raises InvalidRecord.
    """

    name: str
    header: str
    path: str
    decode: Callable[[str], float]


class _Action(msgspec.Struct):
    time: str


def _decode_action(text: str) -> float:
    """Return the time of AWS's JSON. Hibernating and stopping take the machine back too."""
    try:
        return decode_time(msgspec.json.decode(text, type=_Action).time)
    except (msgspec.MsgspecError, RecursionError):
        raise InvalidRecord(f"{text[:60]!r} is no action with a time") from None


AWS = MetadataService(
    "AWS", "X-aws-ec2-metadata-token", "/latest/meta-data/spot/instance-action", _decode_action
)
ALIBABA = MetadataService(
    "Alibaba Cloud",
    "X-aliyun-ecs-metadata-token",
    "/latest/meta-data/instance/spot/termination-time",
    decode_time,
)


class _Refused(Exception):
    """The answer has another status than 200 and 404."""

    def __init__(self, status: int) -> None:
        super().__init__(status)
        self.status = status


class MetadataClient:
    """Asks one service. Connections are made in a network namespace, if one is given.

    Anything may answer at its address, so an answer is bounded in bytes and time. Redirects are not
    followed.

    A service that gives its tokens to the machine only (a hop limit of 1) gives none to a pod's own network.
    """

    def __init__(self, service: MetadataService, address: str, network: Path | None = None) -> None:
        """Args: address: HOST or HOST:PORT, where HOST is an IP address. Raises InvalidAddress."""
        self.service = service
        self.address = address
        self._family, self._target = _parse_address(address)
        self._network = network
        self._token: bytes = b""

    async def reclaim_at(self) -> float | None:
        """Return when the machine is taken back, None if there is no notice. Raises MetadataUnavailable."""
        try:
            async with asyncio.timeout(TIMEOUT_S):
                body = await self._read_notice()
            text = body.decode().strip() if body else ""
            return self.service.decode(text) if text else None
        except TimeoutError:
            why = f"does not answer within {TIMEOUT_S:g} s"
        except _Refused as refused:
            why = f"answers with status {refused.status}"
        except (UnicodeDecodeError, asyncio.LimitOverrunError, EOFError):
            why = "does not answer in HTTP"
        except InvalidRecord as invalid:
            why = f"sends an invalid notice: {invalid}"
        except OSError as error:
            why = f"cannot be reached: {error.strerror or error}"
        self._token = b""
        raise MetadataUnavailable(f"{self.service.name}'s metadata service at {self.address} {why}")

    async def _read_notice(self) -> bytes | None:
        if self._token:
            with contextlib.suppress(_Refused):
                return await self._get()
        # There is none yet, or it has expired.
        self._token = await self._new_token()
        return await self._get()

    async def _get(self) -> bytes | None:
        """Return the notice, None for status 404."""
        header = f"{self.service.header}: {self._token.decode()}\r\n"
        try:
            return await self._exchange(f"GET {self.service.path}", header)
        except _Refused as refused:
            if refused.status == 404:
                return None
            raise

    async def _new_token(self) -> bytes:
        header = f"{self.service.header}-ttl-seconds: {_TOKEN_LIFE_S}\r\nContent-Length: 0\r\n"
        token = (await self._exchange("PUT /latest/api/token", header)).strip()
        # Anything else could end the header in which it is sent.
        if not _TOKEN.fullmatch(token):
            raise EOFError
        return token

    async def _exchange(self, request: str, header: str) -> bytes:
        """Return the body of an answer with status 200. Raises _Refused."""
        loop = asyncio.get_running_loop()
        connection = await asyncio.to_thread(self._make_socket)
        try:
            await loop.sock_connect(connection, self._target)
            reader, writer = await asyncio.open_connection(sock=connection, limit=MAX_HEAD)
        except BaseException:
            connection.close()
            raise
        try:
            # HTTP/1.0: a body in chunks would be no answer to it.
            lines = f"{request} HTTP/1.0\r\nHost: {self.address}\r\n{header}\r\n"
            writer.write(lines.encode())
            return await _read(reader)
        finally:
            writer.transport.abort()

    def _make_socket(self) -> socket.socket:
        def make() -> socket.socket:
            made = socket.socket(self._family, socket.SOCK_STREAM)
            made.setblocking(False)
            return made

        return make() if self._network is None else call_inside(self._network, make)


async def _read(reader: asyncio.StreamReader) -> bytes:
    head = await reader.readuntil(b"\r\n\r\n")
    status = _STATUS.match(head)
    if status is None:
        raise EOFError
    if status[1] != b"200":
        raise _Refused(int(status[1]))
    length = _LENGTH.search(head)
    if length is None:
        body = await reader.read(MAX_BODY)
        while block := await reader.read(MAX_BODY):
            body += block
            if len(body) > MAX_BODY:
                raise EOFError
        return body
    if int(length[1]) > MAX_BODY:
        raise EOFError
    return await reader.readexactly(int(length[1]))


def _parse_address(text: str) -> tuple[socket.AddressFamily, tuple[str, int]]:
    match = _ADDRESS.fullmatch(text)
    with contextlib.suppress(ValueError):
        if match and (port := int(match["port"] or _PORT)) < 1 << 16:
            host = ipaddress.ip_address(match["host"].strip("[]"))
            family = socket.AF_INET if host.version == 4 else socket.AF_INET6
            return family, (str(host), port)
    raise InvalidAddress(
        f"{text[:60]!r} is no address of a metadata service: expected an IP address, or IP:PORT"
    )


_LOG = logging.getLogger(__name__)

INTERVAL_S = 5.0
"""Alibaba Cloud gives 5 minutes, AWS 2."""
WITHDRAWN_AFTER = 3
"""Answers without a notice in a row, until one that was there counts as withdrawn."""
UNAVAILABLE_AFTER = 12
"""Passes in a row in which no service answers, until an event says so."""


@dataclass(frozen=True, slots=True)
class Notice:
    """A service's answer. at: when the machine is taken back; None for never, as far as is known."""

    source: str
    at: float | None


def annotations_to_write(
    current: Mapping[str, str], notices: Sequence[Notice], withdrawn: bool
) -> dict[str, str | None]:
    """Return what has to change of the Node's annotations; None removes one.

    Args:
        current: the Node's annotations.
        notices: what the services say that answered.
        withdrawn: whether the service that gave the published notice has none any more, for certain.
    """
    earliest = min(
        (notice for notice in notices if notice.at is not None),
        key=lambda notice: (notice.at, notice.source),
        default=None,
    )
    written, source = current.get(RECLAIM_AT), current.get(RECLAIM_SOURCE)
    if earliest is None or earliest.at is None:
        return {RECLAIM_AT: None, RECLAIM_SOURCE: None} if source and withdrawn else {}
    if written is not None and source is None and _earlier(written, earliest.at):
        return {}  # A person's.
    wanted = {RECLAIM_AT: encode_time(earliest.at), RECLAIM_SOURCE: earliest.source}
    return {name: value for name, value in wanted.items() if current.get(name) != value}


def _earlier(written: str, at: float) -> bool:
    try:
        return decode_time(written) <= at
    except InvalidRecord:
        return False


class SpotFollower:
    """Asks every few seconds. `run` is its task."""

    def __init__(self, api: NodeApi, clients: Sequence[MetadataClient], when: SpotNotices) -> None:
        """Args: when: `auto` asks while the Node's label says that it is a spot instance."""
        self._api, self._clients, self._when = api, clients, when
        self._without = 0
        self._unavailable = 0

    async def run(self) -> None:
        """Run until cancelled."""
        while True:
            await self.look()
            await asyncio.sleep(INTERVAL_S)

    async def look(self) -> None:
        """Ask once, and write what has changed."""
        node = self._api.node
        if node is None or not self._enabled(node.metadata.labels):
            return
        notices = await self._ask(node.spec.provider_id)
        current = node.metadata.annotations
        published = next(
            (notice for notice in notices if notice.source == current.get(RECLAIM_SOURCE)), None
        )
        if published is not None:
            # A single answer without the notice may be an error of a service that is busy.
            self._without = self._without + 1 if published.at is None else 0
        changes = annotations_to_write(current, notices, self._without >= WITHDRAWN_AFTER)
        if not changes:
            return
        try:
            await self._api.annotate_node(changes)
        except (ApiError, ApiUnreachable) as error:
            _LOG.warning("the spot notice is written again: %s", error)
            return
        _LOG.warning("spot notice: %s", changes.get(RECLAIM_AT) or "withdrawn")

    def _enabled(self, labels: Mapping[str, str]) -> bool:
        marked = self._when == "auto" and labels.get(CAPACITY) == "spot"
        return marked or self._when == "always"

    async def _ask(self, provider_id: str) -> list[Notice]:
        """Return what the services of this machine's cloud say; those that do not answer say nothing."""
        clients = [client for client in self._clients if _may_answer(client, provider_id)]
        answers = await asyncio.gather(*map(_notice, clients))
        notices = [answer for answer in answers if isinstance(answer, Notice)]
        failures = [str(answer) for answer in answers if isinstance(answer, MetadataUnavailable)]
        self._unavailable = 0 if notices else self._unavailable + 1
        if self._unavailable == UNAVAILABLE_AFTER:
            self._api.node_event(
                "FenkaSpotNotices",
                f"fenka: a take-back of this spot instance would come without notice: {'; '.join(failures)}",
            )
        return notices


async def _notice(client: MetadataClient) -> Notice | MetadataUnavailable:
    try:
        return Notice(client.service.name, await client.reclaim_at())
    except MetadataUnavailable as error:
        return error


def _may_answer(client: MetadataClient, provider_id: str) -> bool:
    """Return whether the service may be that of the machine's cloud. Without a providerID each may be."""
    return not provider_id or (client.service is AWS) == provider_id.startswith("aws:")
