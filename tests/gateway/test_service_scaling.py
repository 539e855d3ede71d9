"""The gateways' leader sets the number of replicas: by which figures, when not, and what tenants can do."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any, cast

import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, generate_latest

from fenka.cluster.service_objects import InvalidScaling, read_scaling, scaling_text
from fenka.core.scaling import ScalingPolicy
from fenka.gateway.endpoints import EndpointSource, GatewayPeer
from fenka.gateway.figures import FiguresReader, GatewayFigures, LoadReading
from fenka.gateway.service_scaling import ScalingMetrics, ServiceScaling
from fenka.kubernetes.api_client import Api
from tests.fakes.api_server import FakeApiServer, api_server

RANGE = ScalingPolicy(0, 3, 2, 0.0, 60.0)


@dataclass
class Source:
    """A service as EndpointSource has it."""

    api: Api
    namespace: str = "team"
    service: str = "bert"
    gateways: list[GatewayPeer] = field(
        default_factory=lambda: [
            GatewayPeer("a", "10.0.0.1", True),
            GatewayPeer("b", "10.0.0.2", True),
        ]
    )
    annotated: dict[str, str] = field(default_factory=dict)

    def peers(self) -> list[GatewayPeer]:
        """Return the gateways."""
        return self.gateways

    def annotations(self) -> dict[str, str]:
        """Return the Service's annotations."""
        return self.annotated


@dataclass
class Figures:
    """The figures of gateways."""

    reading: LoadReading = field(default_factory=LoadReading)

    async def read(self) -> LoadReading:
        """Return them."""
        return self.reading


@dataclass
class Service:
    """A service with one version, whose gateway `a` leads."""

    server: FakeApiServer
    source: Source
    figures: Figures
    now: float = 1000.0

    def gateway(self, pod: str = "a") -> ServiceScaling:
        """Return the scaling of a gateway."""
        source, figures = cast(EndpointSource, self.source), cast(FiguresReader, self.figures)
        return ServiceScaling(source, figures, pod, lambda: self.now)

    def load(
        self, in_flight: float, waiting: float = 0, missing: dict[str, str] | None = None
    ) -> None:
        """Let the gateways report these requests."""
        ready = {"v1": float(self.replicas)}
        figures = GatewayFigures({"v1": in_flight}, {"v1": 100}, ready, {"v1": 99.0}, waiting)
        self.figures.reading = LoadReading((figures,), missing or {})

    @property
    def replicas(self) -> int:
        """The number of replicas."""
        return int(self.server.get("deployments", "bert-v1", "team")["spec"]["replicas"])

    @replicas.setter
    def replicas(self, number: int) -> None:
        meta = {"name": "bert-v1", "namespace": "team"}
        self.server.put("deployments", {"metadata": meta, "spec": {"replicas": number}})


@contextlib.asynccontextmanager
async def service(policy: ScalingPolicy = RANGE, replicas: int = 1) -> AsyncIterator[Service]:
    """Provide a service on a cluster."""
    async with api_server() as server, server.api() as api:
        source = Source(api, annotated={"fenka.io/scaling": scaling_text({"v1": policy})})
        known = Service(server, source, Figures())
        known.replicas = replicas
        known.load(0)
        yield known


async def test_replicas_follow_the_load_from_zero_and_back() -> None:
    """A request that waits starts one; the last goes when the version was idle for the pause."""
    async with service(replicas=0) as bert:
        scaling = bert.gateway()
        await scaling.look()
        assert (bert.replicas, bert.server.writes) == (0, [])
        bert.load(0, waiting=1)
        await scaling.look()
        assert bert.replicas == 1
        bert.load(5)
        await scaling.look()
        assert bert.replicas == 3
        bert.load(0)
        for elapsed, expected in ((1, 3), (58, 3), (2, 0)):
            bert.now += elapsed
            await scaling.look()
            assert bert.replicas == expected
        paths = {path for path, _ in bert.server.writes}
        assert paths == {"/apis/apps/v1/namespaces/team/deployments/bert-v1/scale"}


async def test_nothing_is_written_while_the_number_is_right() -> None:
    """And the scale is read now and then only."""
    async with service() as bert:
        scaling = bert.gateway()
        bert.load(2)
        for _ in range(9):
            bert.now += 1
            await scaling.look()
        assert not bert.server.writes
        assert len(bert.server.requests) == 1


async def test_number_that_somebody_else_has_set_is_read_before_it_is_changed() -> None:
    """The decision is made again for it."""
    async with service() as bert:
        scaling = bert.gateway()
        bert.load(2)
        await scaling.look()
        bert.replicas = 3
        bert.load(6)
        await scaling.look()
        assert (bert.replicas, bert.server.writes) == (3, [])


@pytest.mark.parametrize(
    ("gateways", "leads"),
    [
        ([("a", True), ("b", True)], "a"),
        ([("a", False), ("b", True)], "b"),
        ([("b", True)], "b"),
        ([("a", False)], ""),
        ([], ""),
    ],
)
async def test_first_ready_gateway_scales(gateways: list[tuple[str, bool]], leads: str) -> None:
    """The others do nothing."""
    async with service(replicas=0) as bert:
        bert.source.gateways = [GatewayPeer(pod, "10.0.0.1", ready) for pod, ready in gateways]
        bert.load(0, waiting=1)
        for pod in ("a", "b"):
            scaling = bert.gateway(pod)
            await scaling.look()
            assert scaling.leads == (pod == leads)
            assert bert.replicas == (pod >= leads if leads else 0)


async def test_two_leaders_agree() -> None:
    """Each follows the API server at its own pace."""
    async with service() as bert:
        first, second = bert.gateway(), bert.gateway()
        for load in (4, 6, 6, 1, 1, 0, 0):
            bert.load(load)
            numbers = []
            for scaling in (first, second):
                await scaling.look()
                numbers.append(bert.replicas)
            assert numbers[0] == numbers[1]
            bert.now += 30


async def test_new_leader_removes_nothing_before_the_pause_is_over() -> None:
    """It does not know what load there was before."""
    async with service(replicas=3) as bert:
        first, second = bert.gateway("a"), bert.gateway("b")
        bert.load(0)
        await first.look()
        bert.now += 59
        bert.source.gateways = bert.source.gateways[1:]
        for elapsed, expected in ((0, 3), (59, 3), (2, 0)):
            bert.now += elapsed
            for scaling in (first, second):
                await scaling.look()
            assert bert.replicas == expected


# ---- figures that are missing ----


async def test_replicas_are_added_and_none_is_removed_when_a_gateway_does_not_answer() -> None:
    """The load of the others is a lower bound."""
    async with service(replicas=1) as bert:
        scaling = bert.gateway()
        missing = {"b": "does not answer"}
        bert.load(4, missing=missing)
        await scaling.look()
        assert bert.replicas == 2
        bert.load(0, missing=missing)
        for _ in range(5):
            bert.now += 50
            await scaling.look()
        assert bert.replicas == 2
        # The time without its figures is no time without load.
        bert.load(0)
        for elapsed, expected in ((1, 2), (58, 2), (3, 0)):
            bert.now += elapsed
            await scaling.look()
            assert bert.replicas == expected


async def test_version_that_a_gateway_does_not_know_yet_keeps_its_replicas() -> None:
    """It may still hold back requests."""
    async with service(replicas=2) as bert:
        scaling = bert.gateway()
        bert.figures.reading = LoadReading((GatewayFigures({}, {}, {}, {}, 0),))
        for _ in range(5):
            bert.now += 50
            await scaling.look()
        assert bert.replicas == 2


@given(
    st.lists(
        st.tuples(st.floats(0, 20), st.floats(0, 20), st.booleans(), st.floats(0, 100)), max_size=20
    ),
    st.integers(0, 3),
)
def test_no_replica_is_removed_without_all_figures(
    looks: list[tuple[float, float, bool, float]], least: int
) -> None:
    """Whatever the other gateways report, and whenever; and the number stays in its range."""

    async def run() -> None:
        async with service(ScalingPolicy(least, 4, 2, 5.0, 60.0), replicas=max(least, 1)) as bert:
            scaling = bert.gateway()
            for in_flight, waiting, missing, elapsed in looks:
                bert.now += elapsed
                before = bert.replicas
                bert.load(in_flight, waiting, {"b": "?"} if missing else None)
                await scaling.look()
                assert least <= bert.replicas <= 4
                assert bert.replicas >= before or not missing

    asyncio.run(run())


# ---- what is not scaled ----


async def test_version_is_left_alone_when_somebody_has_stopped_it() -> None:
    """With a range from 1 it never has none by itself. So its deployment is not completed either."""
    async with service(ScalingPolicy(1, 3, 2), replicas=0) as bert:
        bert.load(0, waiting=9)
        await bert.gateway().look()
        assert (bert.replicas, bert.server.writes) == (0, [])


async def test_entry_of_a_deleted_version_is_harmless(caplog: pytest.LogCaptureFixture) -> None:
    """The others are scaled, and nothing is logged."""
    async with service(replicas=0) as bert:
        policies = {"gone": RANGE, "v1": RANGE}
        bert.source.annotated["fenka.io/scaling"] = scaling_text(policies)
        bert.load(0, waiting=1)
        scaling = bert.gateway()
        await scaling.look()
        assert bert.replicas == 1
        assert not [record for record in caplog.records if record.levelname == "WARNING"]


async def test_refusal_is_logged_once_and_shown_by_a_metric(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Another version is scaled all the same."""
    async with service(replicas=0) as bert:
        policies = {"v0": RANGE, "v1": RANGE}
        bert.source.annotated["fenka.io/scaling"] = scaling_text(policies)
        bert.load(0, waiting=1)

        async def forbid(request: web.Request) -> web.Response | None:
            if "bert-v0" in request.path:
                return web.json_response({"message": "no right", "code": 403}, status=403)
            return None

        bert.server.before = forbid
        scaling = bert.gateway()
        for _ in range(3):
            bert.now += 20
            await scaling.look()
        assert bert.replicas == 1
        warnings = [record.message for record in caplog.records if record.levelname == "WARNING"]
        assert warnings == ["version v0 is not scaled: no right"]
        text = metrics_of(scaling)
        assert 'fenka_gateway_scaling_failed{version="v0"} 1.0' in text
        assert 'fenka_gateway_scaling_failed{version="v1"} 0.0' in text
        assert 'fenka_gateway_scaling_replicas{version="v1"} 1.0' in text


def metrics_of(scaling: ServiceScaling) -> str:
    """Return the metrics of a gateway's scaling."""
    registry = CollectorRegistry()
    ScalingMetrics(scaling, registry)
    return generate_latest(registry).decode()


async def test_failure_to_look_does_not_end_the_gateway(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Requests matter more; the next look may succeed."""
    async with service(replicas=0) as bert:
        bert.load(0, waiting=1)
        scaling, failures = bert.gateway(), 1

        async def fail_once() -> LoadReading:
            nonlocal failures
            failures -= 1
            if failures == 0:
                raise RuntimeError("a mistake")
            return bert.figures.reading

        monkeypatch.setattr(bert.figures, "read", fail_once)
        monkeypatch.setattr("fenka.gateway.service_scaling.LOOK_S", 0.0)
        task = asyncio.create_task(scaling.follow())
        async with asyncio.timeout(60):
            while bert.replicas == 0:
                await asyncio.sleep(0)
        task.cancel()
        assert "a mistake" in caplog.text


# ---- the annotation ----


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "[" * 10000,
        '{"v1": {"least": 0}}',
        '{"v1": {"least": 0, "most": 3, "target": 0}}',
        '{"v1": {"least": 2, "most": 1, "target": 1}}',
        '{"v1": {"least": 0, "most": 0, "target": 1}}',
        '{"v1": {"least": 0, "most": 9999, "target": 1}}',
        '{"v1": {"least": 0, "most": 3, "target": 1, "down-after": 1e9}}',
        '{"v1": {"least": 0, "most": 3, "target": 1, "color": "red"}}',
        '{"../../x": {"least": 0, "most": 3, "target": 1}}',
        '{"v1\\n": {"least": 0, "most": 3, "target": 1}}',
        json.dumps({f"v{number}": {"least": 0, "most": 1, "target": 1} for number in range(101)}),
        " " * 100_000,
    ],
)
async def test_nothing_is_scaled_when_the_annotation_is_invalid(
    text: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Tenants write it. It is named in the log, once, and by a metric."""
    async with service(replicas=0) as bert:
        bert.source.annotated["fenka.io/scaling"] = text
        bert.load(0, waiting=1)
        scaling = bert.gateway()
        for _ in range(3):
            await scaling.look()
        assert (bert.replicas, bert.server.requests) == (0, [])
        (record,) = caplog.records
        assert record.message.startswith("no version is scaled: annotation fenka.io/scaling ")
        assert len(record.message) < 400
        assert "fenka_gateway_scaling_valid 0.0" in metrics_of(scaling)
        del bert.source.annotated["fenka.io/scaling"]
        await scaling.look()
        assert "fenka_gateway_scaling_valid 1.0" in metrics_of(scaling)


policies = st.builds(
    ScalingPolicy,
    st.integers(0, 3),
    st.integers(3, 1000),
    st.integers(1, 1_000_000),
    st.floats(0, 3600),
    st.floats(0, 3600),
)


@given(st.dictionaries(st.from_regex(r"\A[a-z0-9]([a-z0-9-]{0,17}[a-z0-9])?\Z"), policies))
def test_annotation_is_read_as_it_was_written(versions: dict[str, ScalingPolicy]) -> None:
    """By another program."""
    assert read_scaling({"fenka.io/scaling": scaling_text(versions)}) == versions


@given(st.text() | st.recursive(st.none() | st.floats() | st.text(), st.lists).map(json.dumps))
def test_annotation_raises_nothing_else(text: str) -> None:
    """A gateway must survive whatever it says."""
    with contextlib.suppress(InvalidScaling):
        read_scaling({"fenka.io/scaling": text})


def test_service_without_annotation_scales_nothing() -> None:
    """Its versions have numbers, or KEDA."""
    annotations: dict[str, Any] = {}
    assert read_scaling(annotations) == {}
