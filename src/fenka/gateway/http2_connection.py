"""Both sides of HTTP/2: frames, flow control, and streams that are passed on.

h2 does the protocol. It takes a GOAWAY frame for the end of the connection, although streams go on after it.
These frames are therefore cut out before h2 sees them, and written without it.
"""

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable

from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.errors import ErrorCodes
from h2.events import Event
from h2.exceptions import FrameTooLargeError, ProtocolError
from h2.settings import SettingCodes, Settings
from hyperframe.frame import GoAwayFrame

from fenka.core.units import MIB
from fenka.gateway.heads import MAX_HEAD_BYTES, Fields, Reader

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
MAX_STREAMS = 100
"""Requests at a time on one connection."""
STREAM_WINDOW = 64 * 1024 - 1
"""Bytes of a stream that wait in memory for its other side."""
CONNECTION_WINDOW = 2 * MAX_STREAMS * STREAM_WINDOW
"""More than all streams together, so that a stream that waits holds up no other."""
MAX_UNSENT_BYTES = MIB
"""Of frames that a peer makes the gateway send, such as answers to pings, and does not read."""

_HEAD_FRAMES = (1, 9)
"""HEADERS and CONTINUATION."""
_END_HEADERS = 0x4
_GOAWAY = 7
_FRAME_HEAD = 9
_MAX_FRAME = 16 * 1024
"""The default of the protocol, which the gateway does not raise."""


class GoAwayFilter:
    """Cuts GOAWAY frames out of what was received.

    Attributes:
        last_stream: The last stream that the peer serves, None before a GOAWAY.
        head_bytes: Bytes so far of a head that is not complete. h2 keeps them.
    """

    def __init__(self, preface: int) -> None:
        """preface: the bytes before the first frame."""
        self.last_stream: int | None = None
        self.head_bytes = 0
        self._left = preface
        """Bytes of the current frame that are still to come."""
        self._partial = b""

    def feed(self, data: bytes) -> bytes:
        """Return what was received, without GOAWAY frames. Raises FrameTooLargeError."""
        data = self._partial + data
        self._partial = b""
        passed = []
        at = 0
        while at < len(data):
            if self._left:
                passed.append(data[at : at + self._left])
                at += len(passed[-1])
                self._left -= len(passed[-1])
                continue
            if len(data) - at < _FRAME_HEAD:
                break
            length = int.from_bytes(data[at : at + 3], "big")
            if length > _MAX_FRAME:
                # h2 would first receive such a frame, and what is no HTTP/2 looks like it.
                raise FrameTooLargeError
            if data[at + 3] in _HEAD_FRAMES:
                complete = data[at + 4] & _END_HEADERS
                self.head_bytes = 0 if complete else self.head_bytes + length
                if self.head_bytes > 2 * MAX_HEAD_BYTES:
                    raise FrameTooLargeError
            if data[at + 3] != _GOAWAY:
                self._left = _FRAME_HEAD + length
                continue
            end = at + _FRAME_HEAD + length
            if len(data) < end:
                break
            last = int.from_bytes(data[at + _FRAME_HEAD : at + _FRAME_HEAD + 4], "big")
            self.last_stream = last & 0x7FFFFFFF
            at = end
        self._partial = data[at:]
        return b"".join(passed)


class Half:
    """One direction of a stream: what came from one connection and goes to another.

    Attributes:
        ended: The source has sent everything.
        finished: The sink was sent everything.
        moved_at: When the sink last took anything, or the source last had nothing that waits.
        held_bytes: Bytes that wait for the sink.
        trailers: The fields behind the body.
    """

    def __init__(self, source: "Http2Connection", source_id: int, now: float) -> None:
        self.ended = self.finished = False
        self.trailers: Fields | None = None
        self.moved_at = now
        self._source, self._source_id = source, source_id
        self._sink: Http2Connection | None = None
        self._sink_id = 0
        self.held_bytes = 0
        self._chunks: deque[tuple[bytearray, int]] = deque()
        """Pending bytes, with their count in the source's window."""

    @property
    def waits(self) -> bool:
        """Return whether bytes wait for the sink."""
        return bool(self._chunks)

    def add(self, data: bytes, flow_bytes: int, now: float) -> None:
        """Take a part of the body. flow_bytes: what it counts in the source's window."""
        if not self._chunks:
            self.moved_at = now
        if not data:
            # Flow control does not bound how many frames without data there are.
            self._source.acknowledge(self._source_id, flow_bytes)
            return
        self.held_bytes += len(data)
        last, flow = self._chunks[-1] if self._chunks else (None, 0)
        if last is not None and len(last) + len(data) <= _MAX_FRAME:
            last += data
            self._chunks[-1] = last, flow + flow_bytes
        else:
            self._chunks.append((bytearray(data), flow_bytes))

    def connect(self, sink: "Http2Connection", sink_id: int, head: Fields) -> None:
        """Send the head, and what has come of the body."""
        self._sink, self._sink_id = sink, sink_id
        self.finished = self.ended and not self._chunks and self.trailers is None
        sink.send_head(sink_id, head, end=self.finished)
        self.pump()

    def pump(self) -> None:
        """Send what the sink accepts."""
        sink = self._sink
        if sink is None or self.finished:
            return
        while self._chunks:
            data, flow_bytes = self._chunks[0]
            room = sink.room(self._sink_id)
            if len(data) > room:
                if room > 0:
                    sink.send_data(self._sink_id, bytes(data[:room]), end=False)
                    self.held_bytes -= room
                    self._chunks[0] = data[room:], flow_bytes
                    self.moved_at = sink.clock()
                return
            self._chunks.popleft()
            self.held_bytes -= len(data)
            self.finished = self.ended and not self._chunks and self.trailers is None
            sink.send_data(self._sink_id, bytes(data), end=self.finished)
            self._source.acknowledge(self._source_id, flow_bytes)
            self.moved_at = sink.clock()
        if self.ended and not self.finished:
            self.finished = True
            if self.trailers is not None:
                sink.send_head(self._sink_id, self.trailers, end=True)
            else:
                sink.send_data(self._sink_id, b"", end=True)


class Http2Connection(Reader):
    """A connection of HTTP/2, of either side.

    Attributes:
        clock: Returns the current time.
        sending: What is sent, by stream.
        unread_since: Since when the peer does not read, None if it reads.
    """

    def __init__(self, clock: Callable[[], float], *, client_side: bool) -> None:
        self.clock = clock
        self.sending: dict[int, Half] = {}
        self.unread_since: float | None = None
        self._filter = GoAwayFilter(0 if client_side else len(PREFACE))
        self._transport: asyncio.Transport | None = None
        self._flushing = False
        # Bytes that are sent were validated when they were received.
        self._h2 = H2Connection(
            H2Configuration(
                client_side=client_side,
                header_encoding=None,
                validate_outbound_headers=False,
                normalize_outbound_headers=False,
            )
        )
        settings = {
            SettingCodes.MAX_CONCURRENT_STREAMS: MAX_STREAMS,
            SettingCodes.INITIAL_WINDOW_SIZE: STREAM_WINDOW,
            SettingCodes.MAX_HEADER_LIST_SIZE: MAX_HEAD_BYTES,
            SettingCodes.ENABLE_PUSH: 0,
        }
        self._h2.local_settings = Settings(client=client_side, initial_values=settings)

    # ---- called by asyncio ----

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Send the settings."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._h2.initiate_connection()
        self._h2.increment_flow_control_window(CONNECTION_WINDOW)
        self._flush()

    def pause_writing(self) -> None:
        """Send no more bodies: the peer does not read."""
        self.unread_since = self.clock()

    def resume_writing(self) -> None:
        """Send bodies again."""
        self.unread_since = None
        self._pump_all()

    def data_received(self, data: bytes) -> None:
        """Take frames."""
        try:
            events = self._h2.receive_data(self._filter.feed(data))
            for event in events:
                self.on_event(event)
            self.after_events()
        except ProtocolError:
            # h2 has written why.
            self.close()
            return
        self._schedule_flush()

    # ---- sending: a stream that has ended meanwhile takes nothing, and that is no error ----

    @property
    def open(self) -> bool:
        """Return whether anything can be sent."""
        return self._transport is not None and not self._transport.is_closing()

    def room(self, stream: int) -> int:
        """Return how many bytes of a stream can be sent now."""
        if not self.open or self.unread_since is not None:
            return 0
        try:
            window = self._h2.local_flow_control_window(stream)
        except ProtocolError:
            return 0
        return min(window, self._h2.max_outbound_frame_size)

    def send_head(self, stream: int, fields: Fields, *, end: bool) -> None:
        """Send a head or trailers."""
        self._send(lambda: self._h2.send_headers(stream, fields, end_stream=end))

    def send_data(self, stream: int, data: bytes, *, end: bool) -> None:
        """Send a part of a body, which has room."""
        self._send(lambda: self._h2.send_data(stream, data, end_stream=end))

    def acknowledge(self, stream: int, size: int) -> None:
        """Let the peer send as many bytes more."""
        if size:
            self._send(lambda: self._h2.acknowledge_received_data(size, stream))

    def reset(self, stream: int, code: ErrorCodes | int) -> None:
        """End a stream at once, if it has not ended."""
        self.sending.pop(stream, None)
        self._send(lambda: self._h2.reset_stream(stream, code))

    def go_away(self) -> None:
        """Let the peer open no more streams."""
        self._flush()
        if self._transport is not None:
            last = self._h2.highest_inbound_stream_id
            self._transport.write(GoAwayFrame(0, last_stream_id=last).serialize())

    def _send(self, send: Callable[[], None]) -> None:
        if self.open:
            with contextlib.suppress(ProtocolError):
                send()
            self._schedule_flush()

    def close(self) -> None:
        """End the connection after what was sent."""
        if self._transport is not None:
            self._flush()
            self._transport.close()

    def abort(self) -> None:
        """End the connection at once."""
        if self._transport is not None:
            self._transport.abort()

    # ---- receiving ----

    def on_event(self, event: Event) -> None:
        """Take what h2 has understood."""
        raise NotImplementedError

    def after_events(self) -> None:
        """Go on after all events of one read."""

    def on_window(self, stream: int | None) -> None:
        """Send what the peer now accepts: of one stream, or of all."""
        if not stream:
            self._pump_all()
        elif stream in self.sending:
            self.sending[stream].pump()

    def _pump_all(self) -> None:
        for half in list(self.sending.values()):
            half.pump()

    def _schedule_flush(self) -> None:
        """Write once for all that this turn of the event loop sends."""
        if not self._flushing and self._transport is not None:
            self._flushing = True
            asyncio.get_running_loop().call_soon(self._flush)

    def _flush(self) -> None:
        self._flushing = False
        data = self._h2.data_to_send()
        if data and self._transport is not None:
            self._transport.write(data)
            if self._transport.get_write_buffer_size() > MAX_UNSENT_BYTES:
                self._transport.abort()
