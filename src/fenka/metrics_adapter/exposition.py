"""Sums gauges in Prometheus' text format, which tenants write: block by block, within bounds. Pure.

Lines of other metrics are never split off, so a long answer costs no more than a search in its bytes.
"""

import math
import re
from collections.abc import Iterator, Mapping

from fenka.core.errors import FenkaError
from fenka.metrics_adapter.wire import MAX_VALUE

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
