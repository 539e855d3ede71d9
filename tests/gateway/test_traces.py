"""Spans of requests through a service, as Envoy sends them to a collector."""

from tests.fakes.collector import attributes, collector
from tests.gateway.harness import GET, FakeReplica, installation
from tests.waiting import until


async def test_request_is_traced_from_the_client_s_trace_on() -> None:
    """Envoy joins the trace that a client names, and hands it on; a request without one begins another."""
    theirs, replica = "0af7651916cd43dd8448eb211c80319c", FakeReplica()
    named = f"traceparent: 00-{theirs}-b7ad6b7169203331-01\r\n\r\n".encode()
    async with (
        collector() as got,
        installation(replica, traces=got.url) as served,
        served.client() as client,
    ):
        assert (await client.fetch(GET.replace(b"\r\n\r\n", b"\r\n" + named)))[0] == 200
        assert (await client.fetch())[0] == 200
        await until(lambda: len(got.spans) >= 2)
    first, second = (span for _, span in got.spans)
    assert {program for program, _ in got.spans} == {"fenka-gateway"}
    assert first.trace_id.hex() == theirs
    assert first.parent_span_id.hex() == "b7ad6b7169203331"
    assert second.trace_id not in (first.trace_id, b"")
    assert attributes(first)["http.status_code"] == "200"
    heads = [head.decode() for head in replica.heads]
    assert f"traceparent: 00-{theirs}-{first.span_id.hex()}-01" in heads[0]
    assert f"traceparent: 00-{second.trace_id.hex()}-{second.span_id.hex()}-01" in heads[1]
