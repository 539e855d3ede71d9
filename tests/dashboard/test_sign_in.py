"""Each fence of a cluster's page that asks who looks, alone: all others would let the request through."""

import asyncio
import json
import logging
import socket
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import msgspec
import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer

from fenka.dashboard import page_server
from fenka.dashboard.cluster_live import ClusterLive
from fenka.dashboard.cluster_pages import ClusterPages
from fenka.dashboard.guard import LOOPBACK_NAMES, Guard
from fenka.dashboard.page_server import MAX_STREAMS_OF_VIEWER
from fenka.dashboard.sign_in import GROUPS, KEPT_S, SECRET, USER, ProxySignIn, TokenSignIn
from fenka.dialects.resize_records import REQUEST
from fenka.server.listener import LISTENER, HttpListener
from fenka.views.board import World
from tests.builders import T4_MIB, Json, node_json, on_card, pod_json
from tests.dashboard.test_cluster_live import UID, notebook
from tests.dashboard.test_cluster_pages import Client, waiting
from tests.fakes.api_server import FakeApiServer, api_server
from tests.fakes.clock import Clock
from tests.scheduler.harness import briefly
from tests.waiting import until

SECRET_TEXT = "s" * 32
BEN_UID = "5b0b1b1c-0000-4000-8000-000000000002"
READ = ["world", "live", f"program/{UID}", f"history?program={UID}", f"logs/{UID}"]


@dataclass
class Rights:
    """What the API server knows of users.

    Attributes:
        users: By token.
        lists: The namespaces in which each may list pods; "" is all of them.
        asked: The specs of all reviews.
        tokens: The tokens of all other requests, by method and path.
    """

    users: dict[str, str] = field(default_factory=lambda: {"t-ada": "ada", "t-root": "root"})
    lists: dict[str, set[str]] = field(default_factory=lambda: {"ada": {"ada"}, "root": {""}})
    asked: list[Json] = field(default_factory=list)
    tokens: dict[str, str] = field(default_factory=dict)
    away: bool = False

    async def before(self, request: web.Request) -> web.Response | None:
        """Answer reviews, and refuse what a user may not do."""
        kind = request.path.rpartition("/")[2]
        if kind in {"tokenreviews", "subjectaccessreviews"}:
            if self.away:
                return web.Response(status=500)
            spec = (await request.json())["spec"]
            self.asked.append(spec)
            if kind == "tokenreviews":
                name = self.users.get(spec["token"])
                user = {"username": name or "", "groups": ["g"], "extra": {"a": ["b"]}}
                return web.json_response({"status": {"authenticated": bool(name), "user": user}})
            masters = "system:masters" in spec["groups"]
            where = spec["resourceAttributes"]["namespace"]
            allowed = masters or where in self.lists.get(spec["user"], ())
            return web.json_response({"status": {"allowed": allowed}})
        bearer = request.headers.get("Authorization", "").removeprefix("Bearer ")
        if bearer:
            self.tokens[f"{request.method} {request.path}"] = bearer
            if self.users.get(bearer) == "ada" and request.method == "DELETE":
                refusal = {"kind": "Status", "reason": "Forbidden", "message": "ada cannot delete"}
                return web.json_response(refusal, status=403)
        return None


@asynccontextmanager
async def signed_in(
    mode: str, rights: Rights, clock: Clock
) -> AsyncIterator[tuple[Client, FakeApiServer]]:
    """Yield a client of a page of a cluster in which ada and ben hold 4 units each, and ben waits for 12."""
    theirs = pod_json("train", 4, uid=BEN_UID, node="n", annotations=on_card(0, 4))
    theirs["metadata"]["namespace"] = "ben"
    theirs["status"] |= {"phase": "Running"}
    async with api_server() as server, server.api() as api:
        server.before = rights.before
        server.put("nodes", node_json("n", T4_MIB))
        for pod in (notebook(), theirs, waiting("next", 12)):
            server.put("pods", pod)
        live = ClusterLive(api, "lab", sleep=briefly)
        sign_in = (
            TokenSignIn(api, clock)
            if mode == "kubernetes"
            else ProxySignIn(api, SECRET_TEXT, clock)
        )
        app = ClusterPages(live, {}, sign_in=sign_in).app(Guard("", LOOPBACK_NAMES))
        app[LISTENER] = HttpListener()
        following = asyncio.create_task(live.run())
        try:
            await until(lambda: live.namespaces == {"ada", "ben"})
            # The queue is read beside the pods.
            await until(lambda: (world := live.world()) and world.waiting)
            async with TestClient(TestServer(app)) as client:
                yield client, server
        finally:
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)


async def ask(client: Client, path: str, headers: Any = (), body: object = None) -> tuple[int, Any]:
    """Return the status and the answer."""
    method = "GET" if body is None else "POST"
    async with client.request(method, f"/api/{path}", headers=headers, json=body) as answer:
        if path == "live" and answer.status == 200:
            return 200, None
        text = await answer.text()
        return answer.status, json.loads(text) if text[:1] in "{[" else text


def bearer(token: str) -> dict[str, str]:
    """The field with a token."""
    return {"Authorization": f"Bearer {token}"}


def proxied(user: str, groups: str = "") -> dict[str, str]:
    """The fields of a proxy."""
    return {SECRET: SECRET_TEXT, USER: user} | ({GROUPS: groups} if groups else {})


@pytest.mark.parametrize(
    ("mode", "headers", "sentence"),
    [
        ("kubernetes", {}, "paste a token"),
        ("kubernetes", {"Authorization": "Basic t-ada"}, "paste a token"),
        ("kubernetes", [*bearer("t-ada").items()] * 2, "paste a token"),
        ("kubernetes", bearer("t-nobody"), "does not accept this token"),
        ("kubernetes", bearer("t\xe4"), "paste a token"),
        ("kubernetes", proxied("ada"), "paste a token"),
        ("proxy", {USER: "ada"}, "by way of its proxy only"),
        ("proxy", proxied("ada") | {SECRET: "s" * 31}, "by way of its proxy only"),
        ("proxy", [*proxied("ada").items(), (SECRET, "x")], "by way of its proxy only"),
        ("proxy", bearer("t-ada"), "by way of its proxy only"),
        ("proxy", {SECRET: SECRET_TEXT}, "who looks"),
        ("proxy", [*proxied("ada").items(), (USER, "root")], "who looks"),
        ("proxy", proxied("system:admin"), "who looks"),
        ("proxy", proxied(" "), "who looks"),
    ],
)
async def test_nothing_is_read_by_somebody_unknown(mode: str, headers: Any, sentence: str) -> None:
    """401 on every path that reads, and on those that change."""
    async with signed_in(mode, Rights(), Clock()) as (client, _):
        for path in READ:
            status, answer = await ask(client, path, headers)
            assert (status, sentence in answer["problem"]) == (401, True), (path, answer)
        for path in [
            "what-if",
            *([f"stop/{UID}", f"resize/{UID}"] if mode == "kubernetes" else []),
        ]:
            body = {"gpu_mem": "2"} if "resize" in path else {}
            assert (await ask(client, path, headers, body))[0] == 401, path


async def test_proxy_names_no_group_of_kubernetes() -> None:
    """A client whose groups the proxy passes on must not become an administrator by them."""
    for groups in ("system:masters", "team, system:masters"):
        async with signed_in("proxy", Rights(), Clock()) as (client, _):
            status, answer = await ask(client, "world", proxied("ada", groups))
            assert (status, "Kubernetes' own groups" in answer["problem"]) == (403, True)


@pytest.mark.parametrize(
    ("mode", "headers"), [("kubernetes", bearer("t-ada")), ("proxy", proxied("ada", "g, h"))]
)
async def test_namespaces_are_hidden_whose_pods_a_viewer_may_not_list(
    mode: str, headers: Mapping[str, str]
) -> None:
    """Others' slices have a size and no name, on the page, in the stream, in details and questions."""
    rights = Rights()
    async with signed_in(mode, rights, Clock()) as (client, _):
        status, answer = await ask(client, "world", headers)
        assert status == 200
        world = msgspec.convert(answer, World)
        (card,) = world.cards
        named = {(piece.name, piece.user, piece.program, piece.held_mib) for piece in card.slices}
        assert named == {("notebook", "ada", UID, 4308), ("other", "", "", 4308)}
        assert [line.user for line in world.programs] == ["ada"]
        assert (world.waiting, world.waiting_total) == ([], 1)
        assert [line.user for line in world.people] == ["ada"]
        stream = await client.get("/api/live?node=n", headers=headers)
        seen = b""
        while b"event: node" not in seen or b"event: world" not in seen:
            seen += await stream.content.readany()
        stream.close()
        for text in (json.dumps(answer).encode(), seen):
            assert b"ben" not in text
            assert BEN_UID.encode() not in text
            assert b"train" not in text
        for path in (f"program/{BEN_UID}", f"history?program={BEN_UID}", "program/ben%2Fnext"):
            assert (await ask(client, path, headers))[0] in (404, 200 if "history" in path else 404)
        status, detail = await ask(client, f"program/{UID}", headers)
        assert (status, "ben" in json.dumps(detail)) == (200, False)
        assert (await ask(client, "what-if", headers, {"end": []}))[0] == 403
    accesses = [spec for spec in rights.asked if "resourceAttributes" in spec]
    assert {spec["resourceAttributes"]["namespace"] for spec in accesses} == {"", "ada", "ben"}
    assert {spec["resourceAttributes"]["verb"] for spec in accesses} == {"list"}
    groups = ["g"] if mode == "kubernetes" else ["g", "h", "system:authenticated"]
    assert all(spec["groups"] == groups for spec in accesses)


async def test_all_is_shown_to_who_may_list_all_pods() -> None:
    """One review for all namespaces, whatever their number."""
    rights = Rights()
    async with signed_in("kubernetes", rights, Clock()) as (client, _):
        _, answer = await ask(client, "world", bearer("t-root"))
        assert {line["user"] for line in answer["programs"]} == {"ada", "ben"}
        assert [line["name"] for line in answer["waiting"]] == ["next"]
        assert answer["actions"]
        assert (await ask(client, "what-if", bearer("t-root"), {"add": {"Tesla T4": 1}}))[1][
            "starts"
        ] == ["next"]
    assert len(rights.asked) == 2


async def test_pods_are_changed_with_the_viewer_s_token() -> None:
    """The API server decides. Its no is the page's sentence, and the dashboard's own rights are not used."""
    rights = Rights()
    async with signed_in("kubernetes", rights, Clock()) as (client, server):
        path = "/api/v1/namespaces/ada/pods/notebook"
        assert (await ask(client, f"stop/{UID}", bearer("t-ada"), {})) == (
            403,
            {"problem": "ada cannot delete"},
        )
        assert rights.tokens[f"DELETE {path}"] == "t-ada"
        status, _ = await ask(client, f"resize/{UID}", bearer("t-ada"), {"gpu_mem": "2"})
        assert (status, rights.tokens[f"PATCH {path}"]) == (200, "t-ada")
        assert "2" in server.get("pods", "notebook", "ada")["metadata"]["annotations"][REQUEST]
        container = server.get("pods", "notebook", "ada")["spec"]["containers"][0]["name"]
        server.logs["notebook", container] = ["2026-01-01T00:00:00Z hello"]
        status, text = await ask(client, f"logs/{UID}?lines=1", bearer("t-ada"))
        assert rights.tokens[f"GET {path}/log"] == "t-ada"
        assert (status, "hello" in text) == (200, True)
        assert (await ask(client, f"stop/{BEN_UID}", bearer("t-ada"), {}))[0] == 404
        assert (await ask(client, f"stop/{UID}", bearer("t-root"), {}))[0] == 200
        assert ("pods", "ada", "notebook") not in server.objects
        for body in ({"gpu_mem": "much"}, {"gpu_mem": "2", "gpu_core_mode": "soft"}):
            assert (await ask(client, f"resize/{BEN_UID}", bearer("t-root"), body))[0] == 400


async def test_behind_a_proxy_nothing_can_be_changed() -> None:
    """There is no token to do it with."""
    async with signed_in("proxy", Rights(), Clock()) as (client, _):
        assert (await ask(client, f"stop/{UID}", proxied("root"), {}))[0] == 405
        assert (await ask(client, f"logs/{UID}", proxied("root")))[0] == 403
        assert not (await ask(client, "world", proxied("root")))[1]["actions"]


async def test_right_that_is_withdrawn_ends_after_half_a_minute() -> None:
    """Of a stream that is open, too."""
    rights, clock = Rights(), Clock()
    async with signed_in("kubernetes", rights, clock) as (client, _):
        stream = await client.get("/api/live", headers=bearer("t-ada"))
        assert stream.status == 200
        del rights.users["t-ada"]
        assert (await ask(client, "world", bearer("t-ada")))[0] == 200
        clock.now += KEPT_S
        assert (await ask(client, "world", bearer("t-ada")))[0] == 401
        async with asyncio.timeout(20):
            while await stream.content.readany():
                pass


async def test_nobody_looks_while_the_api_server_does_not_say_who(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """And no token stands in an answer or in the log."""
    caplog.set_level(logging.DEBUG)
    async with signed_in("kubernetes", Rights(away=True), Clock()) as (client, _):
        status, answer = await ask(client, "world", bearer("t-ada"))
        assert (status, "did not say who you are" in answer["problem"]) == (503, True)
    assert "t-ada" not in json.dumps(answer) + caplog.text


TENANT = "system:serviceaccount:ada:reader"


@pytest.mark.parametrize(
    ("mode", "headers", "status"),
    [("kubernetes", bearer("t-pod"), 401), ("proxy", proxied("nobody"), 403)],
)
async def test_page_is_refused_to_those_who_may_list_pods_nowhere(
    mode: str, headers: Mapping[str, str], status: int
) -> None:
    """Every pod has a token. The sentence says which right is missing."""
    rights = Rights()
    rights.users["t-pod"] = "system:serviceaccount:ben:default"
    async with signed_in(mode, rights, Clock()) as (client, _):
        for path in READ:
            got, answer = await ask(client, path, headers)
            assert (got, "may list pods in a namespace" in answer["problem"]) == (status, True), (
                path
            )


@pytest.mark.parametrize("user", ["cho", "system:serviceaccount:cho:reader"])
async def test_page_is_shown_to_those_whose_namespaces_have_no_cards_yet(user: str) -> None:
    """A right in a namespace of other pods suffices, and a ServiceAccount's in its own."""
    rights = Rights()
    rights.users["t-cho"] = user
    rights.lists[user] = {"cho"}
    async with signed_in("kubernetes", rights, Clock()) as (client, server):
        if user == "cho":
            plain = pod_json("web", 0, node="n")
            plain["metadata"] |= {"namespace": "cho", "uid": "u-cho"}
            server.put("pods", plain)

        async def status() -> int:
            return (await ask(client, "world", bearer("t-cho")))[0]

        while await status() != 200:
            await asyncio.sleep(0)


async def test_viewer_follows_eight_streams_at_most_with_all_accounts_of_a_namespace() -> None:
    """Others still find room. Another token of the namespace counts with the first."""
    rights = Rights()
    for number in range(2):
        name = f"{TENANT}-{number}"
        rights.users[f"t-{number}"], rights.lists[name] = name, {"ada"}
    async with signed_in("kubernetes", rights, Clock()) as (client, _):
        streams = [
            await client.get("/api/live", headers=bearer(f"t-{number % 2}"))
            for number in range(MAX_STREAMS_OF_VIEWER)
        ]
        assert {stream.status for stream in streams} == {200}
        for number in range(2):
            status, answer = await ask(client, "live", bearer(f"t-{number}"))
            assert (status, "you follow 8 pages" in answer["problem"]) == (429, True)
        assert (await ask(client, "live", bearer("t-root")))[0] == 200
        for stream in streams:
            stream.close()


async def test_stream_ends_when_its_viewer_reads_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its place is free again, though the connection is never closed by the viewer."""
    monkeypatch.setattr(page_server, "UNREAD_S", 0.05)
    monkeypatch.setattr(page_server, "MAX_STREAMS_OF_VIEWER", 1)
    async with signed_in("kubernetes", Rights(), Clock()) as (client, server):
        silent = socket.create_connection((client.host, client.port or 0))
        silent.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        request = "GET /api/live HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer t-ada\r\n\r\n"
        silent.sendall(request.encode())
        silent.setblocking(False)
        # Only now, since a stream of `ask` could take the only place first.
        status = await asyncio.get_running_loop().sock_recv(silent, 12)
        assert status == b"HTTP/1.1 200"
        for number in range(40):
            pod = pod_json(f"wait-{number}", 12, uid=f"u-{number}")
            pod["metadata"] |= {"namespace": "ada"}
            server.put("pods", pod)
        while (await ask(client, "live", bearer("t-ada")))[0] != 429:
            await asyncio.sleep(0)
        assert await followed_again(client)
        silent.close()


async def followed_again(client: Client) -> bool:
    """Return when a stream of ada is admitted."""
    while (await ask(client, "live", bearer("t-ada")))[0] == 429:
        await asyncio.sleep(0)
    return True
