"""The API server of the benchmark, in a process of its own.

``api_process.py NODES EVENTS_PER_SECOND [--without-reports]``; nodes report what their first pods hold.

Prints its port once it serves. Lists are encoded in advance, and every page of a list is of the same version.
``POST /bench/requests/FIRST/COUNT`` and ``POST /bench/pending/FIRST/COUNT`` create pods of the workload.
``POST /bench/gangs/COUNT/NAMESPACES`` creates gangs.
"""

import asyncio
import gc
import random
import sys
from pathlib import Path

import msgspec
from aiohttp import web

sys.path.insert(0, str(Path(__file__).parents[2]))

from bench.extender import workload
from bench.extender.workload import PODS_PER_NODE, Json
from tests.fakes.api_server import FakeApiServer, Key, Target

KINDS = ("nodes", "pods")


class BulkApiServer(FakeApiServer):
    """Keeps the workload's objects encoded, by kind and key."""

    def __init__(self, nodes: int, *, reports: bool) -> None:
        super().__init__()
        self.nodes = nodes
        self.generations: dict[int, int] = {}
        """The number of pods that were at a place before, where any were."""
        self.encoded: dict[str, dict[Key, bytes]] = {kind: {} for kind in KINDS}
        self._lists: dict[str, list[bytes]] = {}
        for number in range(nodes):
            self._load("nodes", workload.node(number, reports=reports))
        for place in range(nodes * PODS_PER_NODE):
            self._load("pods", workload.resident(place))
        self.compact()

    def _load(self, kind: str, obj: Json) -> None:
        self.version += 1
        meta = obj["metadata"]
        meta["resourceVersion"] = str(self.version)
        key = kind, meta.get("namespace", ""), meta["name"]
        self.encoded[kind][key] = msgspec.json.encode(obj)

    def _keep(self, key: Key, obj: Json, type_: str) -> Json:
        kept = super()._keep(key, obj, type_)
        if key[0] in KINDS:
            self.encoded[key[0]][key] = msgspec.json.encode(kept)
        return kept

    def end_pod(self, place: int) -> None:
        """End the pod at a place."""
        obj = workload.resident(place, self.generations.get(place, 0))
        key = "pods", obj["metadata"]["namespace"], obj["metadata"]["name"]
        del self.encoded["pods"][key]
        self.objects[key] = obj
        self.remove(*key[::2], namespace=key[1])

    def start_pod(self, place: int) -> None:
        """Let another pod run at a place."""
        self.generations[place] = self.generations.get(place, 0) + 1
        self.put("pods", workload.resident(place, self.generations[place]))

    async def churn(self, events_per_second: float) -> None:
        """End pods and start others in their places until cancelled."""
        rng = random.Random(1)
        while True:
            place = rng.randrange(self.nodes * PODS_PER_NODE)
            for change in (self.end_pod, self.start_pod):
                await asyncio.sleep(1 / events_per_second)
                change(place)

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        if request.path.startswith("/bench/"):
            _, _, kind, first, count = request.path.split("/")
            if kind == "gangs":
                for pod in workload.gangs(int(first), int(count)):
                    self.put("pods", pod)
                return web.Response()
            make = {"requests": workload.request, "pending": workload.pending}[kind]
            for number in range(int(first), int(first) + int(count)):
                self.put("pods", make(number))
            return web.Response()
        if request.method == "GET" and not request.query.get("watch"):
            target = Target.of(request.path)
            if target.kind in KINDS and not target.name:
                return self._page(target.kind, request)
        return await super()._answer(request)

    def _page(self, kind: str, request: web.Request) -> web.Response:
        token, _, start_text = request.query.get("continue", "").partition(":")
        if not token:
            token = f"{kind}-{self.version}-{len(self._lists)}"
            self._lists[token] = list(self.encoded[kind].values())
        items, start = self._lists[token], int(start_text or 0)
        end = start + (int(request.query.get("limit", 0)) or len(items))
        more = f',"continue":"{token}:{end}"' if end < len(items) else ""
        if not more:
            del self._lists[token]
        version = token.split("-")[1]
        head = f'{{"metadata":{{"resourceVersion":"{version}"{more}}},"items":['.encode()
        body = b"".join((head, b",".join(items[start:end]), b"]}"))
        return web.Response(body=body, content_type="application/json")


async def main(nodes: int, events_per_second: float, *, reports: bool) -> None:
    """Serve until killed."""
    server = BulkApiServer(nodes, reports=reports)
    # Its pauses would be measured as the extender's.
    gc.freeze()
    gc.disable()
    await server.start()
    print(server.port, flush=True)
    await server.churn(events_per_second)


if __name__ == "__main__":
    reports = "--without-reports" not in sys.argv
    asyncio.run(main(int(sys.argv[1]), float(sys.argv[2]), reports=reports))
