"""Test what users hear of requests that no card of the cluster can hold."""

from datetime import UTC, datetime
from typing import Any

import pytest

from fenka.jobs.collection import Contents
from fenka.jobs.kubernetes.submission import submit, submit_notebook
from fenka.jobs.notebook_spec import NotebookSpec
from fenka.jobs.training import TrainingSpec
from tests.builders import T4_MIB, node_json
from tests.fakes.api_server import FakeApiServer, api_server

NOW = datetime(2026, 11, 22, 13, 0, tzinfo=UTC)


async def warnings(server: FakeApiServer, **cards: Any) -> list[str]:
    """Submit a training and a notebook; return what users are warned of."""
    heard: list[str] = []
    training = TrainingSpec(kind="pytorch", name="train", image="i", command=["run"], **cards)
    notebook = NotebookSpec(name="lab", image="i", **cards)
    async with server.api() as api:
        api.on_warning = heard.append
        await submit(api, "team", training, Contents(), NOW)
        await submit_notebook(api, "team", notebook, "password", NOW)
    assert server.get("jobs", "train", "team")
    assert server.get("deployments", "lab", "team")
    return heard


@pytest.mark.parametrize(
    ("cards", "sentence"),
    [
        ({"gpu_mem": "30"}, "the largest card has 14 units, ask for no more"),
        ({"gpus": 3}, "no node has more than 0 cards to give whole"),
        ({"gpu_mem": "14"}, ""),
    ],
)
async def test_user_is_warned_when_no_card_can_hold_the_request(
    cards: dict[str, Any], sentence: str
) -> None:
    """It is submitted all the same: a node with larger cards may come."""
    async with api_server() as server:
        server.put("nodes", node_json("a", T4_MIB))
        heard = await warnings(server, **cards)
    expected = (
        f"it can never start as it is: {sentence}, or add a node that has it; until then it waits"
    )
    assert heard == ([expected] * 2 if sentence else [])


async def test_nothing_is_said_when_users_may_not_list_nodes() -> None:
    """The scheduler's event says it then."""
    async with api_server() as server:
        server.put("nodes", node_json("a", T4_MIB))
        server.forbidden.add("nodes")
        assert await warnings(server, gpu_mem="30") == []
