"""The node program publishes its cloud's notice once, follows changes, and leaves people's alone."""

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fenka.cluster.autoscaling import CAPACITY, RECLAIM_AT, RECLAIM_SOURCE, encode_time
from fenka.cluster.objects import Node
from fenka.kubernetes.api_client import ApiUnreachable
from fenka.node.config import SpotNotices
from fenka.node.spot import (
    ALIBABA,
    AWS,
    UNAVAILABLE_AFTER,
    WITHDRAWN_AFTER,
    MetadataClient,
    Notice,
    SpotFollower,
    annotations_to_write,
)
from tests.fakes.api_server import Json
from tests.fakes.in_process import FakeApi
from tests.node.test_spot_metadata import ABSENT, ACTION, AT, TIME, Service, answer, serving

LATER = "2015-01-05T18:07:00Z"
NODE = "/api/v1/nodes/n1"


class FakeNodeApi:
    """NodeApi, as far as the follower uses it."""

    def __init__(self, **spec: Any) -> None:
        self.api = FakeApi()
        meta: Json = {"labels": {CAPACITY: "spot"}, "annotations": {}}
        self.api.put(NODE, {"metadata": meta, "spec": spec})
        self.events: list[tuple[str, str]] = []
        self.reachable = True

    @property
    def node(self) -> Any:
        """The Node as it is now."""
        return msgspec.convert(self.api.objects[NODE], Node)

    @property
    def annotations(self) -> dict[str, str]:
        """The Node's annotations."""
        written: dict[str, str] = self.api.objects[NODE]["metadata"]["annotations"]
        return written

    async def annotate_node(self, annotations: dict[str, str | None]) -> None:
        """As NodeApi's."""
        if not self.reachable:
            raise ApiUnreachable("away")
        await self.api.patch(NODE, dict, {"metadata": {"annotations": annotations}})

    def node_event(self, reason: str, note: str) -> None:
        """As NodeApi's."""
        self.events.append((reason, note))


def follower(api: FakeNodeApi, service: Service, when: SpotNotices = "auto") -> SpotFollower:
    """Return the follower of a node of Alibaba Cloud."""
    clients = (MetadataClient(ALIBABA, service.address),)
    return SpotFollower(api, clients, when)  # type: ignore[arg-type]


async def test_notice_is_written_once_when_the_service_repeats_it() -> None:
    """The Node has the time and who said so."""
    api = FakeNodeApi()
    async with serving(answer(TIME)) as service:
        spot = follower(api, service)
        await spot.look()
        await spot.look()
    assert api.annotations == {RECLAIM_AT: TIME, RECLAIM_SOURCE: "Alibaba Cloud"}
    assert len(api.api.patches) == 1


async def test_notice_is_moved_when_the_service_names_another_time() -> None:
    """Earlier or later."""
    api = FakeNodeApi()
    async with serving(answer(TIME)) as service:
        spot = follower(api, service)
        await spot.look()
        service.notice = answer(LATER)
        await spot.look()
    assert api.annotations[RECLAIM_AT] == LATER


async def test_notice_is_removed_when_the_service_withdraws_it_for_certain() -> None:
    """A single answer without it, or none at all, changes nothing; a restart of the program neither."""
    api = FakeNodeApi()
    async with serving(answer(TIME)) as service:
        await follower(api, service).look()
        spot = follower(api, service)
        for notice in (ABSENT, ABSENT, answer(TIME), ABSENT, "HTTP/1.1 500 Oh\r\n\r\n", ABSENT):
            service.notice = notice
            await spot.look()
            assert RECLAIM_AT in api.annotations
        await spot.look()
    assert WITHDRAWN_AFTER == 3
    assert api.annotations == {}


async def test_persons_notice_stays_when_the_service_has_none() -> None:
    """An operator who writes the annotation alone decides when it goes."""
    api = FakeNodeApi()
    await api.annotate_node({RECLAIM_AT: TIME})
    async with serving() as service:
        spot = follower(api, service)
        for _ in range(2 * WITHDRAWN_AFTER):
            await spot.look()
    assert api.annotations == {RECLAIM_AT: TIME}


async def test_notice_is_written_later_when_the_api_server_is_away() -> None:
    """The next look writes it."""
    api = FakeNodeApi()
    api.reachable = False
    async with serving(answer(TIME)) as service:
        spot = follower(api, service)
        await spot.look()
        assert api.annotations == {}
        api.reachable = True
        await spot.look()
    assert api.annotations[RECLAIM_AT] == TIME


@pytest.mark.parametrize(
    ("when", "labels", "asks"),
    [
        ("auto", {CAPACITY: "spot"}, True),
        ("auto", {CAPACITY: "on-demand"}, False),
        ("auto", {}, False),
        ("always", {}, True),
        ("never", {CAPACITY: "spot"}, False),
    ],
)
async def test_service_is_asked_only_when_the_option_and_label_say_so(
    when: SpotNotices, labels: dict[str, str], asks: bool
) -> None:
    """The label may come after the program has started."""
    api = FakeNodeApi()
    node = api.api.objects[NODE]
    node["metadata"]["labels"] = labels
    async with serving(answer(TIME)) as service:
        await follower(api, service, when).look()
    assert bool(service.requests) == asks


@pytest.mark.parametrize(
    ("provider_id", "aws", "alibaba"),
    [
        ("aws:///eu-west-1a/i-0abc", True, False),
        ("cn-beijing.i-2ze8a", False, True),
        ("", True, True),
    ],
)
async def test_only_the_machines_cloud_is_asked_when_the_node_says_which(
    provider_id: str, aws: bool, alibaba: bool
) -> None:
    """At another cloud's address anybody may answer. Of two answers the earlier time counts."""
    api = FakeNodeApi(providerID=provider_id)
    async with serving(answer(ACTION)) as one, serving(answer(LATER)) as other:
        clients = MetadataClient(AWS, one.address), MetadataClient(ALIBABA, other.address)
        await SpotFollower(api, clients, "auto").look()  # type: ignore[arg-type]
    assert (bool(one.requests), bool(other.requests)) == (aws, alibaba)
    assert api.annotations[RECLAIM_AT] == (TIME if aws else LATER)


async def test_event_says_once_that_no_service_answers() -> None:
    """Jobs would end without notice, so somebody has to know."""
    api = FakeNodeApi()
    async with serving("HTTP/1.1 503 Oh\r\n\r\n") as service:
        spot = follower(api, service)
        for _ in range(UNAVAILABLE_AFTER + 2):
            await spot.look()
    ((reason, note),) = api.events
    assert reason == "FenkaSpotNotices"
    assert "Alibaba Cloud's metadata service" in note
    assert "status 503" in note


_TIMES = st.integers(0, 4_000_000_000).map(float)


@given(
    written=st.none() | _TIMES.map(encode_time) | st.text(max_size=30),
    source=st.none() | st.sampled_from(["AWS", "Alibaba Cloud"]),
    times=st.lists(st.none() | _TIMES, max_size=2),
    withdrawn=st.booleans(),
)
def test_written_annotations_are_stable_and_name_the_earliest_time(
    written: str | None, source: str | None, times: list[float | None], withdrawn: bool
) -> None:
    """A second pass writes nothing, and a person's notice is never removed or made later."""
    pairs = {RECLAIM_AT: written, RECLAIM_SOURCE: source}
    current = {name: value for name, value in pairs.items() if value is not None}
    notices = [Notice(name, at) for name, at in zip(("AWS", "Alibaba Cloud"), times, strict=False)]
    changes = annotations_to_write(current, notices, withdrawn)
    after = {k: v for k, v in {**current, **changes}.items() if v is not None}
    assert annotations_to_write(after, notices, withdrawn) == {}
    least = min((at for at in times if at is not None), default=None)
    if source is None and written is not None and after.get(RECLAIM_AT) != written:
        assert least is not None
    if least is not None and after.get(RECLAIM_SOURCE):
        assert after[RECLAIM_AT] == encode_time(least)


def test_persons_notice_gives_way_when_the_cloud_is_earlier() -> None:
    """AT is five minutes before LATER."""
    assert annotations_to_write({RECLAIM_AT: LATER}, [Notice("AWS", AT)], False) == {
        RECLAIM_AT: TIME,
        RECLAIM_SOURCE: "AWS",
    }
    assert annotations_to_write({RECLAIM_AT: TIME}, [Notice("AWS", AT + 300)], False) == {}
