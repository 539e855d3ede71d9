"""What the client and the scheduler rely on in an API server: of the fake ones, and of a real one.

FENKA_E2E_KUBECONFIG names the kubeconfig of a cluster in which pods and nodes may be made and removed.
"""

import asyncio
import contextlib
import os
import uuid
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from fenka.cluster.objects import ApiStatus, Pod
from fenka.kubernetes.api_client import Api, ApiError
from fenka.kubernetes.informer import newer
from tests.fakes.api_server import api_server
from tests.fakes.in_process import FakeApi
from tests.waiting import WAIT_S

KUBECONFIG = os.environ.get("FENKA_E2E_KUBECONFIG", "")
PODS = "/api/v1/namespaces/default/pods"


@contextlib.asynccontextmanager
async def connected(which: str) -> AsyncIterator[Api]:
    """Yield a client of a fake or of the real one."""
    if which == "real":
        async with await Api.connect(Path(KUBECONFIG)) as api:
            yield api
    elif which == "in process":
        yield FakeApi()  # type: ignore[misc]
    else:
        async with api_server() as server, server.api() as api:
            yield api


Connected = Callable[[], contextlib.AbstractAsyncContextManager[Api]]


@pytest.fixture(params=["fake", "in process", "real"])
def cluster(request: pytest.FixtureRequest) -> Connected:
    """Return what connects to it."""
    if request.param == "real" and not KUBECONFIG:
        pytest.skip("FENKA_E2E_KUBECONFIG names no cluster")
    return lambda: connected(request.param)


@pytest.fixture
def record(request: pytest.FixtureRequest) -> str:
    """Return an annotation that a binding may have.

    The fakes take what fenka's scheduler may write. A real cluster's policy keeps these names from others.
    """
    real = request.node.callspec.params["cluster"] == "real"
    return "contract" if real else "fenka.io/chosen-by"


@contextlib.asynccontextmanager
async def a_pod(api: Api) -> AsyncIterator[Pod]:
    """Yield a pod that no scheduler tries."""
    name = f"contract-{uuid.uuid4().hex[:8]}"
    body: dict[str, Any] = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "annotations": {"own": "kept"}},
        "spec": {"schedulerName": "none", "containers": [{"name": "c", "image": "busybox"}]},
    }
    pod = await api.create(PODS, Pod, body)
    try:
        yield pod
    finally:
        with contextlib.suppress(ApiError):
            await api.delete(f"{PODS}/{name}", {"gracePeriodSeconds": 0})


def binding(pod: Pod, node: str, record: str, uid: str | None = None) -> dict[str, Any]:
    """Return a binding with an annotation."""
    meta = {
        "name": pod.metadata.name,
        "namespace": "default",
        "uid": uid or pod.metadata.uid,
        "annotations": {record: "yes"},
    }
    target = {"apiVersion": "v1", "kind": "Node", "name": node}
    return {"apiVersion": "v1", "kind": "Binding", "metadata": meta, "target": target}


async def test_binding_copies_annotations_when_the_uid_matches(
    cluster: Connected, record: str
) -> None:
    """The pod is bound and recorded at once, and only once."""

    async with cluster() as api, a_pod(api) as pod:
        path = f"{PODS}/{pod.metadata.name}/binding"
        with pytest.raises(ApiError) as refused:
            await api.create(path, ApiStatus, binding(pod, "nowhere", record, str(uuid.uuid4())))
        assert refused.value.status == 409
        await api.create(path, ApiStatus, binding(pod, "nowhere", record), within_s=WAIT_S)
        found = await api.get(f"{PODS}/{pod.metadata.name}", Pod)
        assert found.spec.node_name == "nowhere"
        assert found.metadata.annotations == {"own": "kept", record: "yes"}
        with pytest.raises(ApiError) as again:
            await api.create(path, ApiStatus, binding(pod, "elsewhere", record))
        assert again.value.status == 409


async def test_requests_answer_404_when_the_pod_is_gone(cluster: Connected, record: str) -> None:
    """It can neither be read nor bound."""

    async with cluster() as api, a_pod(api) as pod:
        await api.delete(f"{PODS}/{pod.metadata.name}", {"gracePeriodSeconds": 0})
        for call in (
            api.get(f"{PODS}/{pod.metadata.name}", Pod),
            api.create(f"{PODS}/{pod.metadata.name}/binding", ApiStatus, binding(pod, "n", record)),
        ):
            with pytest.raises(ApiError) as refused:
                await call
            assert refused.value.status == 404


async def test_watch_reports_what_came_after_the_list(cluster: Connected) -> None:
    """Its versions can be compared."""

    async with cluster() as api:
        _, version = await api.list("/api/v1/pods", Pod)
        async with a_pod(api) as pod:
            changes = api.watch("/api/v1/pods", Pod, version, seconds=2 * int(WAIT_S))
            async with asyncio.timeout(WAIT_S), contextlib.aclosing(changes):  # type: ignore[type-var]
                async for change in changes:
                    if change.object and change.object.metadata.uid == pod.metadata.uid:
                        assert change.type == "ADDED"
                        assert newer(change.version, version)
                        assert not newer(version, change.version)
                        break


async def test_patch_answers_409_when_the_version_is_another(cluster: Connected) -> None:
    """Leader election relies on it."""

    async with cluster() as api, a_pod(api) as pod:
        path = f"{PODS}/{pod.metadata.name}"
        meta = {
            "resourceVersion": pod.metadata.resource_version,
            "labels": {"x": "1"},
        }
        await api.patch(path, Pod, {"metadata": meta})
        with pytest.raises(ApiError) as refused:
            await api.patch(path, Pod, {"metadata": {**meta, "labels": {"x": "2"}}})
        assert refused.value.status == 409


async def test_list_is_complete_when_its_pages_are_short(cluster: Connected, record: str) -> None:
    """Pages of one object, and the pods of one node alone."""

    async with cluster() as api, a_pod(api) as one, a_pod(api) as two:
        await api.create(
            f"{PODS}/{one.metadata.name}/binding", ApiStatus, binding(one, "here", record)
        )
        everything, _ = await api.list(PODS, Pod, limit=1)
        uids = {it.metadata.uid for it in everything}
        assert {one.metadata.uid, two.metadata.uid} <= uids
        mine, _ = await api.list(PODS, Pod, fieldSelector="spec.nodeName=here")
        assert [it.metadata.uid for it in mine] == [one.metadata.uid]


async def test_list_selects_by_labels_that_exist_or_do_not(cluster: Connected) -> None:
    """Screens of training jobs select pods that have one label and lack another."""

    async with cluster() as api, a_pod(api) as plain, a_pod(api) as labelled:
        key = f"contract-{uuid.uuid4().hex[:8]}"
        path = f"{PODS}/{labelled.metadata.name}"
        await api.patch(path, Pod, {"metadata": {"labels": {key: "x"}}})

        async def selected(selector: str) -> set[str]:
            pods, _ = await api.list(PODS, Pod, labelSelector=selector)
            return {pod.metadata.uid for pod in pods}

        uid = labelled.metadata.uid
        assert await selected(key) == await selected(f"{key}=x") == {uid}
        assert await selected(f"{key},!{key}") == set()
        without = await selected(f"!{key}")
        assert uid not in without
        assert plain.metadata.uid in without


@pytest.mark.parametrize("cluster", ["fake", "real"], indirect=True)
async def test_log_is_empty_when_the_pod_has_no_node(cluster: Connected) -> None:
    """Following a log waits for the node, and for the container's start."""

    async with cluster() as api, a_pod(api) as pod:
        path = f"{pod.path}/log"
        blocks = [block async for block in api.stream(path, container="c", follow="true")]
    assert blocks == []


@pytest.mark.parametrize("cluster", ["real"], indirect=True)
async def test_group_that_nobody_serves_answers_404(cluster: Connected) -> None:
    """A kind whose CRD is not installed has no objects."""

    async with cluster() as api:
        with pytest.raises(ApiError) as refused:
            await api.list("/apis/nobody.example.com/v1/namespaces/default/things", Pod)
        assert refused.value.status == 404
