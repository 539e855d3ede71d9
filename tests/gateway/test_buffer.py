"""Requests without a replica: order, and limits of number, bytes and time."""

from hypothesis import given
from hypothesis import strategies as st

from fenka.gateway.dispatcher import BufferLimits, RequestBuffer

LIMITS = BufferLimits(requests=3, total_bytes=100, wait_s=10)


def test_requests_leave_in_the_order_of_arrival() -> None:
    """The buffer is a queue."""
    buffer: RequestBuffer[str] = RequestBuffer(LIMITS)
    assert all(buffer.add(name, 1, 0.0) for name in "abc")
    buffer.remove("a")
    assert list(buffer) == ["b", "c"]


def test_request_is_refused_when_buffer_is_full() -> None:
    """Neither the number of requests nor their bytes exceed the limit."""
    buffer: RequestBuffer[str] = RequestBuffer(LIMITS)
    assert buffer.add("a", 60, 0.0)
    assert not buffer.add("b", 41, 0.0)
    assert buffer.add("b", 20, 0.0)
    assert not buffer.resize("b", 41)
    assert buffer.resize("b", 40)
    buffer.remove("a")
    assert all(buffer.add(name, 1, 0.0) for name in "cd")
    assert not buffer.add("e", 1, 0.0)


def test_request_expires_after_its_time() -> None:
    """Only those that have waited too long are removed."""
    buffer: RequestBuffer[str] = RequestBuffer(LIMITS)
    buffer.add("a", 1, 0.0)
    buffer.add("b", 1, 5.0)
    assert buffer.expire(9.9) == []
    assert buffer.expire(10.0) == ["a"]
    assert list(buffer) == ["b"]


@given(st.lists(st.tuples(st.sampled_from("arx"), st.integers(0, 9), st.integers(0, 60))))
def test_bytes_are_the_sum_of_what_waits(steps: list[tuple[str, int, int]]) -> None:
    """After any steps the count is that of the requests that are kept, and within the limits."""
    buffer: RequestBuffer[int] = RequestBuffer(LIMITS)
    kept: dict[int, int] = {}
    for step, request, size in steps:
        if step == "a" and request not in kept:
            if buffer.add(request, size, 0.0):
                kept[request] = size
        elif step == "r" and request in kept:
            if buffer.resize(request, size):
                kept[request] = size
        elif step == "x":
            buffer.remove(request)
            kept.pop(request, None)
        assert buffer.total_bytes == sum(kept.values()) <= LIMITS.total_bytes
        assert list(buffer) == list(kept)
        assert len(buffer) <= LIMITS.requests
