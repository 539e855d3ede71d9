"""Requests of the client, as the API server receives them."""

import asyncio
import ssl
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from aiohttp import web

from fenka.cluster.objects import ApiStatus, Pod
from fenka.kubernetes import api_client
from fenka.kubernetes.api_client import (
    Api,
    ApiError,
    ApiUnreachable,
    decode_event,
    without_default_certificates,
)
from fenka.kubernetes.kube_config import ApiServer
from tests.fakes.api_server import api_server
from tests.waiting import until


async def test_server_receives_three_quarters_of_the_time_when_a_write_has_a_deadline() -> None:
    """The rest is for connecting, so that both together end in time."""
    limits: list[str | None] = []

    async def record(request: web.Request) -> web.StreamResponse:
        limits.append(request.query.get("timeout"))
        return web.json_response({})

    async with api_server() as server, server.api() as api:
        server.before = record
        for within_s in (8.0, None):
            await api.create("/api/v1/namespaces/n/pods", ApiStatus, {}, within_s=within_s)
    assert limits == ["6000ms", None]


@pytest.mark.parametrize(
    ("status", "body", "expected"),
    [
        (409, '{"reason": "Conflict", "message": "modified"}', (409, "Conflict", "modified")),
        (500, "out of memory", (500, "", "out of memory")),
        (503, "", (503, "", "the API server answers 503")),
    ],
)
async def test_error_has_status_reason_and_message_when_the_server_refuses(
    status: int, body: str, expected: tuple[int, str, str]
) -> None:
    """Also where the answer is no Status: from a proxy in between."""

    async def go(api: Api) -> None:
        with pytest.raises(ApiError) as refused:
            await api.get("/api/v1/nodes/n", ApiStatus)
        assert (refused.value.status, refused.value.reason, str(refused.value)) == expected

    async def refuse(_: web.Request) -> web.StreamResponse:
        return web.Response(status=status, text=body)

    async with api_server() as server, server.api() as api:
        server.before = refuse
        await go(api)


DEEP = 9_990
"""Levels of nested values: Go's decoder, and so the API server, accepts 10,000."""


@pytest.mark.parametrize("nested", ["[" * DEEP + "]" * DEEP, '{"f:a":' * DEEP + "1" + "}" * DEEP])
async def test_object_is_read_when_a_tenant_has_nested_what_nobody_reads(nested: str) -> None:
    """Managed fields, say, or the spec of a kind without a schema. It would hide all objects of the kind."""
    pod = f'{{"metadata":{{"name":"p","managedFields":[{{"fieldsV1":{nested}}}]}}}}'

    async def answer(_: web.Request) -> web.StreamResponse:
        return web.Response(text=f'{{"items":[{pod},{{"metadata":{{"name":"q"}}}}]}}')

    async with api_server() as server, server.api() as api:
        server.before = answer
        pods, _ = await api.list("/api/v1/pods", Pod)
    assert [each.metadata.name for each in pods] == ["p", "q"]
    event = decode_event(f'{{"type":"ADDED","object":{pod}}}'.encode(), Pod)
    assert event.object is not None
    assert event.object.metadata.name == "p"


async def test_answer_is_refused_when_it_is_nested_deeper_than_a_server_accepts() -> None:
    """By an error that callers handle, not by the interpreter's."""

    async def answer(_: web.Request) -> web.StreamResponse:
        return web.Response(text="[" * 1_000_000)

    async with api_server() as server, server.api() as api:
        server.before = answer
        with pytest.raises(ApiError, match="not understood"):
            await api.get("/api/v1/pods/p", Pod)


async def test_client_fails_when_no_server_answers() -> None:
    """The sentence names the server."""

    async with api_server() as server, server.api() as api:
        await server.stop()
        with pytest.raises(ApiUnreachable, match=f"127.0.0.1:{server.port}"):
            await api.get("/api/v1/nodes/n", ApiStatus)
        await server.start()


async def test_request_goes_through_the_proxy_when_the_environment_has_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Unless it excludes the server."""
    async with api_server() as server:
        proxy = f"http://127.0.0.1:{server.port}"
        server.put("pods", {"metadata": {"name": "p", "namespace": "n"}})
        monkeypatch.setenv("http_proxy", proxy)
        cluster = ApiServer("http://cluster.invalid")
        async with Api(cluster) as api:
            await api.get("/api/v1/namespaces/n/pods/p", ApiStatus)
        monkeypatch.setenv("no_proxy", "cluster.invalid")
        async with Api(cluster) as api:
            with pytest.raises(ApiUnreachable):
                await api.get("/api/v1/namespaces/n/pods/p", ApiStatus)


@pytest.mark.parametrize("order", [iter, reversed], ids=["metadata first", "items first"])
async def test_next_page_is_requested_when_one_is_being_used(
    order: Callable[[list[tuple[str, Any]]], Iterator[tuple[str, Any]]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The server prepares it meanwhile. The fields of a list may be in any order."""
    async with api_server() as server, server.api() as api:
        listed = server._list
        monkeypatch.setattr(server, "_list", lambda *of: dict(order([*listed(*of).items()])))
        for name in "abcde":
            server.put("pods", {"metadata": {"name": name, "namespace": "d"}})
        server.max_page = 2
        pages = api.pages("/api/v1/pods", Pod)
        first = await anext(pages)
        assert [pod.metadata.name for pod in first.items or ()] == ["a", "b"]
        await until(lambda: len(server.requests) == 2)
        rest = [page async for page in pages]
        assert [len(page.items or ()) for page in rest] == [2, 1]
        assert len({page.metadata.resource_version for page in (first, *rest)}) == 1


async def test_pages_have_fewer_objects_when_they_are_large(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A page beyond the limit is abandoned; after small ones the number grows again."""
    monkeypatch.setattr(api_client, "PAGE_BYTES", 4096)
    limits = []
    async with api_server() as server, server.api() as api:

        async def note(request: web.Request) -> None:
            limits.append(int(request.query["limit"]))

        server.before = note
        for number in range(30):
            notes = {"annotations": {"note": "x" * (3000 if number < 10 else 10)}}
            server.put("pods", {"metadata": {"name": f"p{number:02}", "namespace": "d", **notes}})
        pods, _ = await api.list("/api/v1/pods", Pod)
        assert [pod.metadata.name for pod in pods] == [f"p{number:02}" for number in range(30)]
        assert limits[:4] == [500, 62, 7, 1]
        assert limits[-1] > 2
        # An object that is larger than the limit is read all the same.
        server.put("pods", {"metadata": {"name": "large", "annotations": {"note": "x" * 9000}}})
        pods, _ = await api.list("/api/v1/pods", Pod)
        assert len(pods) == 31


async def test_other_tasks_run_when_a_large_page_is_decoded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A lease must be renewed meanwhile."""
    monkeypatch.setattr(api_client, "_DECODING_S", -1.0)
    async with api_server() as server, server.api() as api:
        for number in range(200):
            server.put("pods", {"metadata": {"name": f"p{number}", "namespace": "d"}})
        turns = 0

        async def renew() -> None:
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0)

        (data,) = [await api._call("GET", "/api/v1/pods", {})]
        task = asyncio.create_task(renew())
        page = await api_client._page(data, Pod, {})
        task.cancel()
        assert len(page.items or ()) == 200
        assert turns >= 200


def test_default_certificates_are_loaded_when_a_context_is_made_after_the_import() -> None:
    """What is replaced for the import of aiohttp is there again, also if the import fails."""
    with pytest.raises(ModuleNotFoundError), without_default_certificates():
        raise ModuleNotFoundError
    assert "set_default_verify_paths" not in vars(ssl.SSLContext)
