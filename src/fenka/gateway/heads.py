"""Heads of HTTP/1.1 messages: which are accepted, and what is passed on. Pure.

llhttp rejects what is no HTTP: a length beside an encoding, folded lines, bare line feeds. This module checks
what a gateway has to (RFC 9110 and 9112): framing, fields that concern one connection only, the target's
form. Each message is written again from its parts, so a replica and the gateway agree on where it ends.
"""

import asyncio
from collections.abc import Iterable
from urllib.parse import urlsplit

Fields = list[tuple[bytes, bytes]]

MAX_HEAD_BYTES = 64 * 1024
MAX_FIELDS = 200

_CONNECTION_FIELDS = frozenset(
    {
        b"connection",
        b"keep-alive",
        b"proxy-connection",
        b"proxy-authenticate",
        b"proxy-authorization",
        b"te",
        b"transfer-encoding",
        b"upgrade",
    }
)
_REQUEST_FIELDS = _CONNECTION_FIELDS | {b"host", b"content-length", b"x-forwarded-for", b"expect"}
"""Fields of requests that are not just passed on."""
_RESPONSE_FIELDS = _CONNECTION_FIELDS | {b"content-length"}
_COMMON_OPTIONS = frozenset({b"close", b"keep-alive", b"upgrade"})
"""Options of Connection that name no field that is passed on."""
_IDEMPOTENT = frozenset({b"GET", b"HEAD", b"OPTIONS", b"TRACE", b"PUT", b"DELETE"})
_NO_TRAILERS = _REQUEST_FIELDS | {b"trailer", b"set-cookie", b"authorization", b"content-type"}


class BadMessage(Exception):
    """A message that is not passed on. status: what the client is answered."""

    def __init__(self, status: int, sentence: str) -> None:
        super().__init__(sentence)
        self.status = status


class RequestHead:
    """The head of a request.

    Attributes:
        method: Its method.
        wire: What is sent to the replica, up to the empty line.
        http11: The client speaks HTTP/1.1, not 1.0.
        keep_alive: The client's connection can be used for another request.
        chunked: The body is sent in chunks.
        websocket: The connection is to become a websocket.
        idempotent: Sending it twice has the effect of sending it once.
    """

    __slots__ = ("chunked", "http11", "idempotent", "keep_alive", "method", "websocket", "wire")

    def __init__(self, method: bytes, wire: bytes, *, http11: bool, keep_alive: bool) -> None:
        self.method, self.wire = method, wire
        self.http11, self.keep_alive = http11, keep_alive
        self.idempotent = method in _IDEMPOTENT
        self.chunked = self.websocket = False


def read_request(
    method: bytes, target: bytes, version: str, fields: Fields, client: bytes, *, upgrade: bool
) -> RequestHead:
    """Return the head of a request as a replica gets it.

    Args:
        method: The method.
        target: The target as sent.
        version: The version of HTTP that the client speaks.
        fields: All header fields.
        client: The client's address.
        upgrade: The parser takes what follows the head for another protocol.

    Raises:
        BadMessage: The request is not passed on.
    """
    if version not in {"1.1", "1.0"}:
        raise BadMessage(505, f"HTTP/{version} is not supported: use HTTP/1.1 or HTTP/2")
    if len(fields) > MAX_FIELDS:
        raise BadMessage(431, f"the request has more than {MAX_FIELDS} header fields")
    lines = [b""]
    special: dict[bytes, list[bytes]] = {}
    for name, value in fields:
        key = name.lower()
        if key in _REQUEST_FIELDS:
            special.setdefault(key, []).append(value)
        else:
            lines.append(b"%s: %s\r\n" % (name, value))
    http11 = keep_alive = version == "1.1"
    if b"connection" in special:
        options = _tokens(special[b"connection"])
        keep_alive = b"close" not in options and (http11 or b"keep-alive" in options)
        _drop_nominated(lines, options)
    host = special.get(b"host", [])
    if len(host) > 1 or (http11 and not host):
        raise BadMessage(400, "a request must have exactly one Host field")
    target, host = _origin_form(method, target, host)
    lines[0] = b"%s %s HTTP/1.1\r\nHost: %s\r\n" % (method, target, host[0] if host else b"")
    head = RequestHead(method, b"", http11=http11, keep_alive=keep_alive)
    _frame_request(head, special, lines)
    if upgrade:
        _upgrade(head, special, lines)
    if http11 and b"expect" in special:
        lines += [b"Expect: %s\r\n" % value for value in special[b"expect"]]
    if b"x-forwarded-for" in special:
        client = b", ".join([*special[b"x-forwarded-for"], client])
    lines.append(b"X-Forwarded-For: %s\r\n\r\n" % client)
    head.wire = b"".join(lines)
    return head


class ResponseHead:
    """The head of a response.

    Attributes:
        wire: What is sent to the client, up to the empty line.
        chunked: The gateway sends the body in chunks.
        until_close: The replica's body ends when it closes its connection.
        close: The client's connection ends with this response.
    """

    __slots__ = ("chunked", "close", "until_close", "wire")

    def __init__(self, wire: bytes, *, chunked: bool, until_close: bool, close: bool) -> None:
        self.wire, self.chunked, self.until_close, self.close = wire, chunked, until_close, close


def read_response(
    status: int, reason: bytes, fields: Fields, request: RequestHead, *, close: bool
) -> ResponseHead:
    """Return the head of a final response as a client gets it.

    Args:
        status: The status.
        reason: The reason phrase.
        fields: All header fields.
        request: The request.
        close: The client's connection is to end with this response in any case.

    Raises:
        BadMessage: The response's framing is not supported.
    """
    lines = [b"HTTP/1.1 %d %s\r\n" % (status, reason)]
    special: dict[bytes, list[bytes]] = {}
    for name, value in fields:
        key = name.lower()
        if key in _RESPONSE_FIELDS:
            special.setdefault(key, []).append(value)
        else:
            lines.append(b"%s: %s\r\n" % (name, value))
    if b"connection" in special:
        _drop_nominated(lines, _tokens(special[b"connection"]))
    encodings = special.get(b"transfer-encoding")
    if encodings and _tokens(encodings) != [b"chunked"]:
        raise BadMessage(502, "the replica's response has an unsupported transfer encoding")
    length = special.get(b"content-length", [])
    if length:
        lines.append(b"Content-Length: %s\r\n" % length[0])
    has_body = request.method != b"HEAD" and status not in {204, 304}
    unbounded = has_body and not length
    until_close = unbounded and not encodings
    chunked = unbounded and request.http11
    if chunked:
        lines.append(b"Transfer-Encoding: chunked\r\n")
    close = close or not request.keep_alive or (unbounded and not chunked)
    if close:
        lines.append(b"Connection: close\r\n")
    elif not request.http11:
        lines.append(b"Connection: keep-alive\r\n")
    lines.append(b"\r\n")
    return ResponseHead(b"".join(lines), chunked=chunked, until_close=until_close, close=close)


def informational(status: int, reason: bytes, fields: Fields) -> bytes:
    """Return a response that precedes the final one (1xx), without what concerns one connection only."""
    lines = [b"HTTP/1.1 %d %s\r\n" % (status, reason)]
    lines += [
        b"%s: %s\r\n" % (name, value)
        for name, value in fields
        if name.lower() not in _RESPONSE_FIELDS
    ]
    return b"".join(lines) + b"\r\n"


def switching_protocols(reason: bytes, fields: Fields, request: RequestHead) -> bytes:
    """Return the response after which the connection is a websocket. Raises BadMessage if it is none."""
    kept = [(name, value) for name, value in fields if name.lower() not in _CONNECTION_FIELDS]
    upgrades = [value.lower() for name, value in fields if name.lower() == b"upgrade"]
    if upgrades != [b"websocket"] or not request.websocket:
        raise BadMessage(502, "the replica switched to a protocol that was not requested")
    lines = [b"HTTP/1.1 101 %s\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n" % reason]
    lines += [b"%s: %s\r\n" % field for field in kept]
    return b"".join(lines) + b"\r\n"


def trailers(fields: Iterable[tuple[bytes, bytes]]) -> bytes:
    """Return the end of a chunked response, with the trailer fields that may be passed on."""
    lines = [b"%s: %s\r\n" % field for field in fields if field[0].lower() not in _NO_TRAILERS]
    return b"0\r\n" + b"".join(lines) + b"\r\n"


def sentence_response(
    status: int, reason: str, sentence: str, *, close: bool, head_only: bool
) -> bytes:
    """Return a response of the gateway's own."""
    body = f"{sentence}\n".encode()
    lines = [
        f"HTTP/1.1 {status} {reason}",
        "Content-Type: text/plain; charset=utf-8",
        f"Content-Length: {len(body)}",
    ]
    if status == 503:
        lines.append("Retry-After: 1")
    if close:
        lines.append("Connection: close")
    return "\r\n".join([*lines, "", ""]).encode() + (b"" if head_only else body)


def _tokens(values: Iterable[bytes]) -> list[bytes]:
    return [
        token
        for value in values
        for part in value.lower().split(b",")
        if (token := part.strip(b" \t"))
    ]


def _drop_nominated(lines: list[bytes], options: list[bytes]) -> None:
    """Remove the fields that the sender declares as concerning this connection only."""
    nominated = set(options) - _COMMON_OPTIONS
    if nominated:
        lines[1:] = [line for line in lines[1:] if line.partition(b":")[0].lower() not in nominated]


def _origin_form(method: bytes, target: bytes, host: list[bytes]) -> tuple[bytes, list[bytes]]:
    """Return the target without scheme and host, and the Host field that it implies."""
    if method == b"CONNECT":
        raise BadMessage(405, "CONNECT is not supported: this is a service, not a forward proxy")
    if target.startswith(b"/"):
        return target, host
    if target == b"*" and method == b"OPTIONS":
        return target, host
    try:
        url = urlsplit(target)
    except ValueError:
        url = urlsplit(b"")
    if url.scheme not in {b"http", b"https"} or not url.netloc or b"@" in url.netloc:
        raise BadMessage(400, "the request's target is neither a path nor a URL of http")
    path = url.path or (b"*" if method == b"OPTIONS" and not url.query else b"/")
    return (path + b"?" + url.query if url.query else path), [url.netloc]


def _frame_request(
    head: RequestHead, special: dict[bytes, list[bytes]], lines: list[bytes]
) -> None:
    length = special.get(b"content-length", [])
    encodings = special.get(b"transfer-encoding", [])
    if encodings:
        if length or not head.http11:
            raise BadMessage(400, "a request must have either a length or a transfer encoding")
        if [value.lower() for value in encodings] != [b"chunked"]:
            raise BadMessage(501, "the only supported transfer encoding is chunked")
        head.chunked = True
        lines.append(b"Transfer-Encoding: chunked\r\n")
    elif length:
        if len(length) > 1 or not length[0].isdigit():
            raise BadMessage(400, "a request must have one Content-Length, a number")
        lines.append(b"Content-Length: %s\r\n" % length[0])


def _upgrade(head: RequestHead, special: dict[bytes, list[bytes]], lines: list[bytes]) -> None:
    """Pass an upgrade to a websocket on; ignore others, as a server may."""
    if head.chunked or special.get(b"content-length", [b"0"]) != [b"0"]:
        # llhttp takes the body of such a request for what follows the request.
        raise BadMessage(400, "a request that upgrades its connection must have no body")
    if head.http11 and [value.lower() for value in special[b"upgrade"]] == [b"websocket"]:
        head.websocket = True
        lines.append(b"Connection: Upgrade\r\nUpgrade: websocket\r\n")


_BUFFER = bytearray(64 * 1024)
"""Bytes that were read are taken out before another connection is read."""
_VIEW = memoryview(_BUFFER)


class Reader(asyncio.BufferedProtocol):
    """A protocol that gets bytes, as asyncio.Protocol does.

    asyncio's ordinary protocols allocate 256 KiB for each read, which costs more than parsing what was
    read.
    """

    def get_buffer(self, _: int) -> memoryview:
        """Return where the transport puts what it reads."""
        return _VIEW

    def buffer_updated(self, nbytes: int) -> None:
        """Pass on what was read."""
        self.data_received(bytes(_VIEW[:nbytes]))

    def data_received(self, data: bytes) -> None:
        """Take what was read."""
        raise NotImplementedError
