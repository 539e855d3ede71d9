"""An API server on which pods end as on the real one: with a grace, and by their disruption budgets."""

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any

import msgspec

from fenka.autoscaler.actor_context import ActorContext
from fenka.autoscaler.snapshot import Snapshot
from fenka.autoscaler.stores import OrderStore
from fenka.cloud.port import Instance
from fenka.cluster.autoscaling import AutoscalerStatus
from fenka.cluster.objects import Node, Pod
from fenka.cluster.pod_preemption import PodDisruptionBudget, budgets_for
from tests.autoscaler.snapshots import NOW, snapshot
from tests.builders import Json
from tests.fakes.api_server import FakeApiServer, Refusal, Target
from tests.fakes.in_process import FakeApi


@dataclass
class EvictingServer(FakeApiServer):
    """Pods that are evicted or deleted stay until `end_pods`, unless their grace is 0.

    Attributes:
        now: its clock.
        ended: every eviction and deletion that was accepted: verb, pod and grace.
    """

    now: float = NOW
    ended: list[tuple[str, str, int | None]] = field(default_factory=list)

    def handle(self, method: str, path: str, query: Mapping[str, Any], body: Json) -> Json:
        """As the fake's, with evictions and graceful deletions."""
        target = Target.of(path)
        evicts = target.subresource == "eviction"
        if target.kind != "pods" or not (evicts or method == "DELETE"):
            return super().handle(method, path, query, body)
        self.requests.append(f"{method} {path}")
        if target.key not in self.objects:
            raise Refusal(404, "NotFound", f'pods "{target.name}" not found')
        pod = self.objects[target.key]
        options = body.get("deleteOptions", {}) if evicts else body
        if options.get("preconditions", {}).get("uid") not in (None, pod["metadata"]["uid"]):
            raise Refusal(409, "Conflict", "the UID in the precondition is another")
        if evicts:
            self._spend(pod)
        self._end(target, pod, options.get("gracePeriodSeconds"))
        self.ended.append(
            ("evict" if evicts else "delete", target.name, options.get("gracePeriodSeconds"))
        )
        return {"kind": "Status", "status": "Success"}

    def _spend(self, pod: Json) -> None:
        for budget in self.all("poddisruptionbudgets"):
            read = msgspec.convert(budget, PodDisruptionBudget)
            if not budgets_for(msgspec.convert(pod, Pod), [read]):
                continue
            if budget["status"]["disruptionsAllowed"] < 1:
                raise Refusal(
                    429, "TooManyRequests", "it would violate the pod's disruption budget"
                )
            budget["status"]["disruptionsAllowed"] -= 1

    def _end(self, target: Target, pod: Json, grace_s: int | None) -> None:
        own = pod["spec"].get("terminationGracePeriodSeconds", 30)
        grace_s = own if grace_s is None else grace_s
        if not grace_s:
            self.remove("pods", target.name, target.namespace)
            return
        at = self.now + grace_s
        known = pod["metadata"].get("deletionTimestamp")
        if known is not None:
            at = min(at, datetime.fromisoformat(known).timestamp())
        stamp = datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        self.put("pods", {**pod, "metadata": {**pod["metadata"], "deletionTimestamp": stamp}})

    def end_pods(self) -> None:
        """Let the pods that are being deleted end."""
        for pod in self.all("pods"):
            if "deletionTimestamp" in pod["metadata"]:
                self.remove("pods", pod["metadata"]["name"], pod["metadata"]["namespace"])


class Recorder:
    """Keeps events. notes: the object's name, reason and note."""

    def __init__(self) -> None:
        self.notes: list[tuple[str, str, str]] = []

    def record_on_pod(self, pod: Pod, reason: str, note: str) -> None:
        """As EventRecorder's."""
        self.notes.append((pod.metadata.name, reason, note))

    def record_on_node(self, node: Node, reason: str, note: str) -> None:
        """As EventRecorder's."""
        self.notes.append((node.metadata.name, reason, note))


class Killed(Exception):
    """The program was killed here."""


class FakeCloud:
    """A provider whose instances end when told. `server`: what to do then."""

    def __init__(self, *instances: Instance) -> None:
        self.listed = {each.id: each for each in instances}
        self.ended: list[str] = []

    async def end(self, ids: Any) -> None:
        """As Provider's."""
        for each in ids:
            self.ended.append(each)
            self.listed.pop(each, None)


class World:
    """An API server, a cloud and one program. Fields: those of every snapshot.

    Attributes:
        kill_after: how many more writes to server or cloud are done before the program is killed.
    """

    def __init__(self, cloud: FakeCloud | None = None, **fields: Any) -> None:
        self.server, self.recorder = EvictingServer(), Recorder()
        self.cloud = cloud or FakeCloud()
        self.api = FakeApi(self.server)
        self.fields = fields
        self.status = AutoscalerStatus()
        self.leads = True
        self.kill_after: int | None = None
        self.orders = OrderStore(self.api, "gpu")  # type: ignore[arg-type]

    @property
    def now(self) -> float:
        """The time."""
        return self.server.now

    @now.setter
    def now(self, now: float) -> None:
        self.server.now = now

    def snapshot(self) -> Snapshot:
        """What the program knows: all that the server and the cloud have."""
        listed = {each.provider_id for each in self.cloud.listed.values()}
        named = {node["spec"].get("providerID") for node in self.server.all("nodes")} - {None}
        return snapshot(
            missing=dict.fromkeys(named - listed, self.now),
            nodes=tuple(self.server.all("nodes")),
            pods=tuple(self.server.all("pods")),
            now=self.now,
            budgets=tuple(
                msgspec.convert(each, PodDisruptionBudget)
                for each in self.server.all("poddisruptionbudgets")
            ),
            orders=dict(self.orders.records),
            instances=tuple(self.cloud.listed.values()),
            status=self.status,
            **self.fields,
        )

    def context(self) -> ActorContext:
        """What the program acts with."""
        api, cloud = _Killable(self.api, self._count), _Killable(self.cloud, self._count)
        orders = OrderStore(api, "gpu")  # type: ignore[arg-type]
        orders.__dict__.update(self.orders.__dict__)
        orders._map._api = api  # type: ignore[assignment]
        self.orders = orders
        return ActorContext(api, cloud, self.recorder, orders, lambda: self.leads, self.snapshot)  # type: ignore[arg-type]

    def act(self, actor: Any) -> Mapping[str, Any]:
        """Let an actor make its part of a pass. Raises Killed."""
        states: Mapping[str, Any] = asyncio.run(actor.act(self.context()))
        self.status = replace_nodes(self.status, states)
        return states

    def _count(self) -> None:
        if self.kill_after is not None:
            if self.kill_after == 0:
                raise Killed
            self.kill_after -= 1


def replace_nodes(status: AutoscalerStatus, nodes: Mapping[str, Any]) -> AutoscalerStatus:
    """Return the status with these nodes, as it is published after a pass."""
    return msgspec.structs.replace(status, nodes=dict(nodes))


class _Killable:
    """Counts writes before they are sent."""

    def __init__(self, under: Any, count: Callable[[], None]) -> None:
        self._under, self._count = under, count

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._under, name)
        if name not in ("create", "patch", "delete", "end"):
            return method

        async def counted(*arguments: Any, **options: Any) -> Any:
            self._count()
            return await method(*arguments, **options)

        return counted


def later(instance: Instance, **fields: Any) -> Instance:
    """Return the instance with other fields."""
    return replace(instance, **fields)
