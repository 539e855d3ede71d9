"""The metrics that the API serves, and the sums of gauges from tenants' answers, within bounds. Pure.

Wire facts: HorizontalPodAutoscalers request `/apis/external.metrics.k8s.io/v1beta1/namespaces/NS/METRIC`
with a labelSelector, sum the values of the list, and read them in thousandths. Without `/apis` and
`/openapi` the API server uses the list of resources.
"""

import asyncio
import math
import re
from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import msgspec

from fenka.core.errors import FenkaError

GROUP, VERSION = "external.metrics.k8s.io", "v1beta1"
GROUP_VERSION = f"{GROUP}/{VERSION}"
PATH = f"/apis/{GROUP_VERSION}"

REQUESTS, GPU_BUSY = "fenka_requests", "fenka_gpu_busy"

MAX_VALUE = 1e12
"""Larger values are refused: autoscalers compute with thousandths in 64 bits."""

NAMESPACE = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
METRIC = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]{0,199}")

BAD_REQUEST, FORBIDDEN, NOT_FOUND, INTERNAL, UNAVAILABLE = 400, 403, 404, 500, 503
_REASONS = {
    BAD_REQUEST: "BadRequest",
    FORBIDDEN: "Forbidden",
    NOT_FOUND: "NotFound",
    INTERNAL: "InternalError",
    UNAVAILABLE: "ServiceUnavailable",
}
_VERBS = ("get",)


class NoValue(FenkaError):
    """There is no value. code: HTTP's."""

    def __init__(self, sentence: str, code: int = UNAVAILABLE) -> None:
        super().__init__(sentence)
        self.code = code


def resource_list() -> bytes:
    """Return the APIResourceList. Gauges of pods are not in it: any name is one."""
    resources = [
        {
            "name": name,
            "singularName": "",
            "namespaced": True,
            "kind": "ExternalMetricValueList",
            "verbs": _VERBS,
        }
        for name in (REQUESTS, GPU_BUSY)
    ]
    body = {"groupVersion": GROUP_VERSION, "resources": resources}
    return _encoded("APIResourceList", "v1", body)


def value_list(metric: str, value: float, time: datetime) -> bytes:
    """Return the ExternalMetricValueList with one value. time: with its time zone."""
    item = {
        "metricName": metric,
        "metricLabels": {},
        "timestamp": f"{time:%Y-%m-%dT%H:%M:%SZ}",
        "value": quantity(value),
    }
    return _encoded("ExternalMetricValueList", GROUP_VERSION, {"metadata": {}, "items": [item]})


def failure(code: int, sentence: str) -> bytes:
    """Return the Status of a request that fails."""
    body = {
        "metadata": {},
        "status": "Failure",
        "message": sentence,
        "reason": _REASONS[code],
        "code": code,
    }
    return _encoded("Status", "v1", body)


def quantity(value: float) -> str:
    """Return a value as a quantity of Kubernetes, rounded up to thousandths."""
    # Without the difference 0.07 would become 71 thousandths.
    thousandths = max(math.ceil(value * 1000 - 1e-6), 0)
    whole, rest = divmod(thousandths, 1000)
    return f"{thousandths}m" if rest else str(whole)


def _encoded(kind: str, api_version: str, body: dict[str, Any]) -> bytes:
    return msgspec.json.encode({"kind": kind, "apiVersion": api_version, **body})


MAX_LINE = 64 * 1024
MAX_SERIES = 1000
"""Of all metrics that are read; a model server has one series per model."""
MAX_LABEL = 253
"""Characters of a label's value that is read; names on Kubernetes have at most as many."""

LabelValues = tuple[str, ...]
Sums = Mapping[str, Mapping[LabelValues, float]]
"""By metric and the values of the labels that were asked for."""

# Possessive quantifiers, so that no line takes more than linear time.
_SAMPLE = re.compile(
    rb"[^{ \t]++"
    rb'(?:[ \t]*+\{((?:[^"{}\\]|"(?:[^"\\]|\\.)*+")*+)\})?+'
    rb"[ \t]++(\S{1,64}+)(?:[ \t]++-?[0-9]{1,20}+)?+[ \t]*+\r?"
)
_LABEL = re.compile(
    rb'[ \t]*+([a-zA-Z_][a-zA-Z0-9_]*+)[ \t]*+=[ \t]*+"((?:[^"\\]|\\.)*+)"[ \t]*+,?'
)
_NUMBER = re.compile(rb"[+-]?([0-9]+(\.[0-9]*)?|\.[0-9]+)([eE][+-]?[0-9]+)?")
_ESCAPES = {rb"\\": b"\\", rb"\"": b'"', rb"\n": b"\n"}
_ESCAPE = re.compile(rb'\\[\\"n]')
_NOT_GAUGES = frozenset((b"counter", b"histogram", b"summary"))


class InvalidExposition(FenkaError):
    """A text has no usable value. The sentence continues one that names the pod."""


class SumReader:
    """Reads one text.

    Lines of other metrics are never split off, so a long answer costs no more than a search in its bytes.

    Attributes:
        sums: What was read so far.
    """

    def __init__(self, labels: Mapping[str, LabelValues], max_series: int = MAX_SERIES) -> None:
        """labels: the metrics to read, with the names of the labels by which each is summed."""
        self.sums: dict[str, dict[LabelValues, float]] = {name: {} for name in labels}
        self._labels = labels
        self._max_series = max_series
        self._series = 0
        # Each line is found by the line feed before it.
        self._buffer = bytearray(b"\n")

    def feed(self, block: bytes) -> None:
        """Read the next block. Raises InvalidExposition."""
        searched = len(self._buffer)
        self._buffer += block
        end = self._buffer.rfind(b"\n", searched)
        if end >= 0:
            for name in self.sums:
                self._read(name, end)
            del self._buffer[:end]
        if len(self._buffer) > MAX_LINE:
            raise InvalidExposition(f"has a line of more than {MAX_LINE // 1024} KiB")

    def finish(self) -> None:
        """Check what must be complete at the end. Raises InvalidExposition."""
        if len(self._buffer) > 1:
            raise InvalidExposition("ends its metrics in the middle of a line")

    def _read(self, name: str, end: int) -> None:
        encoded = name.encode()
        for line in self._lines(b"\n# TYPE " + encoded + b" ", end):
            kind = line.split()[-1]
            if kind in _NOT_GAUGES:
                raise InvalidExposition(f"has {name} as a {kind.decode()}, expected a gauge")
        for separator in (b"{", b" ", b"\t"):
            for line in self._lines(b"\n" + encoded + separator, end):
                self._add(name, line)

    def _lines(self, beginning: bytes, end: int) -> Iterator[bytes]:
        """Yield the complete lines with this beginning, which starts with the line feed before them."""
        at = self._buffer.find(beginning, 0, end)
        while at >= 0:
            line_end = self._buffer.find(b"\n", at + 1)
            yield bytes(self._buffer[at + 1 : line_end])
            at = self._buffer.find(beginning, line_end, end)

    def _add(self, name: str, line: bytes) -> None:
        self._series += 1
        if self._series > self._max_series:
            raise InvalidExposition(f"has more than {self._max_series} series of {name}")
        match = _SAMPLE.fullmatch(line)
        if match is None:
            raise InvalidExposition(f"has a line of {name} that is not Prometheus' text format")
        value = _value(name, match[2])
        wanted = self._labels[name]
        key = _label_values(name, match[1] or b"", wanted) if wanted else ()
        sums = self.sums[name]
        sums[key] = sums.get(key, 0.0) + value


def _value(name: str, text: bytes) -> float:
    value = float(text) if _NUMBER.fullmatch(text) else math.nan
    if not 0 <= value <= MAX_VALUE:
        shown = text.decode(errors="backslashreplace")[:40]
        raise InvalidExposition(f"has {shown!r} as {name}, expected 0 to {MAX_VALUE:.0e}")
    return value


def _label_values(name: str, text: bytes, wanted: LabelValues) -> LabelValues:
    present = dict(_labels(text))
    try:
        values = [_unescaped(present[label.encode()]).decode() for label in wanted]
    except (KeyError, UnicodeDecodeError):
        raise InvalidExposition(f"has {name} without readable labels {', '.join(wanted)}") from None
    if any(len(value) > MAX_LABEL for value in values):
        raise InvalidExposition(f"has {name} with a label of more than {MAX_LABEL} characters")
    return tuple(values)


def _labels(text: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Yield the labels up to the first that cannot be read."""
    match = _LABEL.match(text)
    while match:
        yield match[1], match[2]
        match = _LABEL.match(text, match.end())


def _unescaped(text: bytes) -> bytes:
    return _ESCAPE.sub(lambda match: _ESCAPES[match[0]], text)


KIB = 1024
MAX_HEAD = 64 * KIB
"""Bytes of a response's head, and the limit of the stream that it is read from."""
MAX_CHUNKS = 10_000
BLOCK = 16 * KIB
"""The most that is read of a body at a time."""

_STATUS = re.compile(rb"HTTP/1\.[01] ([0-9]{3})( .*)?")
_LENGTH = re.compile(rb"[0-9]{1,18}")
_CHUNK = re.compile(rb"([0-9a-fA-F]{1,8})[ \t]*(;.*)?\r\n")


@dataclass(frozen=True, slots=True)
class _Framing:
    """How a body ends. length: in bytes; None if it ends with the connection, or is in chunks."""

    length: int | None
    chunked: bool


async def body(stream: asyncio.StreamReader) -> AsyncIterator[bytes]:
    """Yield the body of a response with status 200. Raises InvalidExposition, OSError and EOFError.

    Requests are of HTTP/1.0, so most servers send a body in one piece. uvicorn, which serves vLLM, sends
    chunks all the same. Chunks of a byte each would cost thousands of times their size, so their number is
    bounded.
    """
    framing = await _read_head(stream)
    if framing.chunked:
        blocks = _chunks(stream)
    elif framing.length is not None:
        blocks = _exactly(stream, framing.length)
    else:
        blocks = _to_end(stream)
    async for block in blocks:
        yield block


async def _read_head(stream: asyncio.StreamReader) -> _Framing:
    try:
        head = await stream.readuntil(b"\r\n\r\n")
    except asyncio.LimitOverrunError:
        raise InvalidExposition(f"answers with a head of more than {MAX_HEAD // KIB} KiB") from None
    first, *lines = head[:-4].split(b"\r\n")
    status = _STATUS.fullmatch(first)
    if status is None:
        raise InvalidExposition("does not speak HTTP")
    if status[1] != b"200":
        raise InvalidExposition(f"answers /metrics with {status[1].decode()}, expected 200")
    fields: dict[bytes, list[bytes]] = {}
    for line in lines:
        name, _, value = line.partition(b":")
        fields.setdefault(name.strip().lower(), []).append(value.strip().lower())
    return _framing(fields)


def _framing(fields: dict[bytes, list[bytes]]) -> _Framing:
    transfer = fields.get(b"transfer-encoding", [])
    if fields.get(b"content-encoding", [b"identity"]) != [b"identity"] or transfer not in (
        [],
        [b"chunked"],
    ):
        raise InvalidExposition("answers /metrics with an encoding that was not asked for")
    lengths = [] if transfer else fields.get(b"content-length", [])
    if len(lengths) > 1 or not all(_LENGTH.fullmatch(length) for length in lengths):
        raise InvalidExposition("answers /metrics with an invalid Content-Length")
    return _Framing(int(lengths[0]) if lengths else None, bool(transfer))


async def _to_end(stream: asyncio.StreamReader) -> AsyncIterator[bytes]:
    while block := await stream.read(BLOCK):
        yield block


async def _exactly(stream: asyncio.StreamReader, length: int) -> AsyncIterator[bytes]:
    while length:
        block = await stream.read(min(BLOCK, length))
        if not block:
            raise EOFError
        length -= len(block)
        yield block


async def _chunks(stream: asyncio.StreamReader) -> AsyncIterator[bytes]:
    for _ in range(MAX_CHUNKS):
        try:
            match = _CHUNK.fullmatch(await stream.readuntil(b"\r\n"))
        except asyncio.LimitOverrunError:
            match = None
        if match is None:
            raise InvalidExposition("answers /metrics with an invalid chunk")
        length = int(match[1], 16)
        if not length:
            return
        async for block in _exactly(stream, length):
            yield block
        if await stream.readexactly(2) != b"\r\n":
            raise InvalidExposition("answers /metrics with an invalid chunk")
    raise InvalidExposition(f"answers /metrics in more than {MAX_CHUNKS} chunks")
