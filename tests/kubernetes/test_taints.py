"""Taints are lists that several controllers write."""

from typing import Any

import msgspec
import pytest

from fenka.cluster.objects import Node
from fenka.kubernetes.api_client import ApiError
from fenka.kubernetes.eviction import add_taint, remove_taint
from tests.builders import Json, node
from tests.fakes.in_process import FakeApi

KEY, PATH = "fenka.io/ending", "/api/v1/nodes/n"
OTHER = {"key": "k", "effect": "NoExecute", "timeAdded": "2026-01-01T00:00:00Z"}


class RacingApi(FakeApi):
    """Another controller adds its taint after each read."""

    async def get(self, path: str, kind: type[Any], **query: Any) -> Any:
        """As `Api.get`."""
        read = await super().get(path, kind, **query)
        self.put(PATH, with_taints(self.objects[PATH], OTHER))
        return read


def with_taints(known: Json, *taints: Json) -> Json:
    """Return the node with these taints."""
    return {**known, "spec": {**known["spec"], "taints": list(taints)}}


def prepared(api: FakeApi, *taints: Json) -> Node:
    """Create a node; return it as it was seen."""
    api.put(PATH, with_taints(node("n"), *taints))
    return msgspec.convert(api.objects[PATH], Node)


def taints(api: FakeApi) -> list[Json]:
    """Return the node's taints."""
    written: list[Json] = api.objects[PATH]["spec"]["taints"]
    return written


async def test_other_taints_stay_when_one_is_added_and_removed() -> None:
    """With fields that fenka does not read."""
    api = FakeApi()
    made = prepared(api, OTHER)
    await add_taint(api, made, KEY)  # type: ignore[arg-type]
    assert taints(api) == [OTHER, {"key": KEY, "effect": "NoSchedule"}]
    await add_taint(api, made, KEY)  # type: ignore[arg-type]
    assert len(api.patches) == 1
    await remove_taint(api, made, KEY)  # type: ignore[arg-type]
    assert taints(api) == [OTHER]


async def test_taint_is_refused_when_another_controller_wrote_in_between() -> None:
    """Its taint would have been lost."""
    api = RacingApi()
    made = prepared(api)
    with pytest.raises(ApiError) as refused:
        await add_taint(api, made, KEY)  # type: ignore[arg-type]
    assert refused.value.status == 409
    assert taints(api) == [OTHER]


async def test_taint_is_refused_when_the_node_is_another_of_the_same_name() -> None:
    """It was deleted and has joined again."""
    api = FakeApi()
    made = prepared(api)
    api.put(PATH, {**node("n"), "metadata": {"name": "n", "uid": "new"}})
    with pytest.raises(ApiError) as refused:
        await add_taint(api, made, KEY)  # type: ignore[arg-type]
    assert refused.value.status == 409
