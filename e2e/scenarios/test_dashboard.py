"""The chart's dashboard, as a person sees it who forwards its port."""

import csv
import io
import json
import re
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from e2e.cluster import wait_until
from e2e.scenarios.containers import installed_with, pod, wait_for_agent
from e2e.scenarios.installation import Installation

ALLOCATE = (
    "import ctypes as c, time; d=c.CDLL('libcuda.so.1'); x=c.c_void_p(); p=c.c_void_p(); d.cuInit(0); "
    "d.cuDevicePrimaryCtxRetain(c.byref(x),0); d.cuCtxSetCurrent(x); "
    "print(d.cuMemAlloc_v2(c.byref(p), c.c_size_t(3344 << 20)), flush=True); time.sleep(1000)"
)
ASK = (
    "import sys, urllib.error, urllib.request as r\n"
    "try: print(r.urlopen(r.Request(sys.argv[1], *[a.encode() for a in sys.argv[2:]],"
    " headers={'Content-Type': 'application/json'}), timeout=10).read().decode())\n"
    "except urllib.error.HTTPError as why: print(why.code, why.read().decode())"
)


@contextmanager
def forwarded(installation: Installation) -> Iterator[str]:
    """Yield the URL of the page, whose port is forwarded while the block runs."""
    cluster = installation.cluster
    command = cluster.command(
        *("kubectl", "-n", "fenka", "port-forward", "deployment/fenka-dashboard", ":8250")
    )
    with subprocess.Popen(
        command, env=cluster.environment(), stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None
            port = re.search(r"127\.0\.0\.1:(\d+)", process.stdout.readline())
            assert port is not None
            yield f"http://127.0.0.1:{port[1]}"
        finally:
            process.terminate()


def ask(installation: Installation, *arguments: str) -> str:
    """Return what the page's server answers."""
    return installation.cluster.run("python3", "-c", ASK, *arguments)


def world(installation: Installation, url: str) -> Any:
    """Return what the page shows now."""
    return json.loads(ask(installation, f"{url}/api/world"))


VOLUME = {
    "apiVersion": "v1",
    "kind": "PersistentVolume",
    "metadata": {"name": "fenka-usage"},
    "spec": {
        "capacity": {"storage": "1Gi"},
        "accessModes": ["ReadWriteOnce"],
        "claimRef": {"namespace": "fenka", "name": "fenka-dashboard-usage"},
        "local": {"path": "/var/lib/fenka-usage"},
    },
}


def usage_rows(installation: Installation, *options: str) -> list[dict[str, str]]:
    """Return the rows of `fenka usage`."""
    return [*csv.DictReader(io.StringIO(installation.fenka("usage", *options, "-o", "csv")))]


def card_hours(rows: list[dict[str, str]]) -> dict[str, float]:
    """Return the hours by name, or by kind where there is no name."""
    return {row["name"] or row["kind"]: float(row["card_hours"]) for row in rows}


@pytest.fixture
def metered(installation: Installation, sharing_node: str) -> Iterator[None]:
    """Install the page with its record of usage, on a volume of the sharing node."""
    cluster = installation.cluster
    cluster.node(sharing_node).run("mkdir", "-p", "/var/lib/fenka-usage")
    expression = {"key": "kubernetes.io/hostname", "operator": "In", "values": [sharing_node]}
    affinity = {"required": {"nodeSelectorTerms": [{"matchExpressions": [expression]}]}}
    volume = {**VOLUME, "spec": {**VOLUME["spec"], "nodeAffinity": affinity}}  # type: ignore[dict-item]
    cluster.apply(json.dumps(volume))
    usage = {"enabled": True, "prices": {"Tesla T4": 0.35}, "currency": "EUR"}
    page = {"enabled": False, "labels": {}, "page": {"enabled": True, "usage": usage}}
    try:
        with installed_with(installation, f"dashboard={json.dumps(page)}"):
            wait_for_agent(installation, sharing_node, 14)
            rollout = ("rollout", "status", "deployment/fenka-dashboard", "--timeout=120s")
            cluster.kubectl("-n", "fenka", *rollout)
            yield
    finally:
        cluster.kubectl("-n", "fenka", "delete", "pvc", "fenka-dashboard-usage")
        cluster.kubectl("delete", "pv", "fenka-usage")
        cluster.node(sharing_node).run("rm", "-rf", "/var/lib/fenka-usage")


@pytest.mark.full
@pytest.mark.usefixtures("metered")
def test_usage_counts_pods_that_ended_before_the_program_was_killed(
    installation: Installation, node: str
) -> None:
    """All lines together cost what the cards did, and the time without the program is unobserved."""
    cluster = installation.cluster
    labels = {"metadata": {"name": "trained", "labels": {"fenka.io/team": "vision"}}}
    cluster.apply(json.dumps({**json.loads(pod("trained", "x=4:")), **labels}))
    cluster.wait_for_pod("trained")
    wait_until(
        "usage of the team",
        lambda: card_hours(usage_rows(installation, "--by", "team")).get("vision", 0) > 0.001,
        120,
    )
    cluster.kubectl("delete", "pod", "trained", "--now")
    before = card_hours(usage_rows(installation, "--by", "job"))["trained"]
    cluster.kubectl(
        *("-n", "fenka", "delete", "pod", "-l", "component=dashboard"),
        *("--force", "--grace-period=0"),
    )
    wait_until(
        "unobserved time after the program's return",
        lambda: "unobserved" in card_hours(usage_rows(installation, "--by", "team")),
        120,
    )
    rows = usage_rows(installation, "--by", "job")
    assert card_hours(rows)["trained"] == pytest.approx(before, abs=0.002)
    assert {row["kind"] for row in rows} == {"held", "idle", "unobserved"}
    total = sum(float(row["card_hours"]) for row in rows)
    assert sum(float(row["cost"]) for row in rows) == pytest.approx(total * 0.35, abs=1e-5)
    bill = installation.fenka("usage", "-o", "focus")
    (trained,) = [
        row for row in csv.DictReader(io.StringIO(bill)) if row["ResourceName"] == "trained"
    ]
    assert json.loads(trained["Tags"])["team"] == "vision"
    assert trained["SkuId"] == "Tesla T4"
    assert node in bill


@pytest.fixture
def dashboard(installation: Installation, sharing_node: str) -> Iterator[str]:
    """Install the page; provide its URL."""
    page = 'dashboard={"enabled":false,"labels":{},"page":{"enabled":true}}'
    with installed_with(installation, page):
        wait_for_agent(installation, sharing_node, 14)
        installation.cluster.kubectl(
            *("-n", "fenka", "rollout", "status", "deployment/fenka-dashboard", "--timeout=120s")
        )
        with forwarded(installation) as url:
            yield url


@pytest.mark.full
def test_page_shows_notebooks_as_bars_and_the_fourth_with_its_reason(
    installation: Installation, dashboard: str, node: str
) -> None:
    """S1: three notebooks use 3344 of 4308 MiB each, and a fourth waits until one of them ends."""
    cluster = installation.cluster
    for name in ("tf-notebook", "tf-notebook-2", "tf-notebook-3"):
        cluster.apply(pod(name, f'x=4:python3 -c "{ALLOCATE}"'))
        cluster.wait_for_pod(name)
    cluster.apply(pod("tf-notebook-4", "x=4:"))
    seen: dict[str, Any] = {}

    def shows_three() -> bool:
        seen.update(world(installation, dashboard))
        tiles = [tile for card in seen["cards"] if card["node"] == node for tile in card["slices"]]
        return sorted((tile["name"], tile["held_mib"]) for tile in tiles) == [
            ("tf-notebook", 4308),
            ("tf-notebook-2", 4308),
            ("tf-notebook-3", 4308),
        ] and all((tile["used_mib"] or 0) >= 3344 for tile in tiles)

    wait_until("three bars with what is used of them", shows_three, 120)
    wait_until(
        "the fourth in the queue",
        lambda: (
            [line["name"] for line in world(installation, dashboard)["waiting"]]
            == ["tf-notebook-4"]
        ),
    )
    waiting = world(installation, dashboard)["waiting"][0]
    queue = installation.fenka("queue")
    assert waiting["why"] in queue
    detail = json.loads(ask(installation, f"{dashboard}/api/program/default%2Ftf-notebook-4"))
    assert "What helps:" in detail["explanation"]
    question = json.dumps({"end": [], "add": {"Tesla T4": 1}})
    answer = json.loads(ask(installation, f"{dashboard}/api/what-if", question))
    assert answer["starts"] == ["tf-notebook-4"]
    cluster.kubectl("delete", "pod", "tf-notebook-2", "--now")

    def shows_fourth() -> bool:
        cards = world(installation, dashboard)["cards"]
        names = {tile["name"] for card in cards for tile in card["slices"]}
        return names >= {"tf-notebook-4"} and "tf-notebook-2" not in names

    wait_until("the fourth in the place of the second", shows_fourth, 120)
    assert "<html" in ask(installation, f"{dashboard}/")
    assert ask(installation, f"{dashboard}/api/stop/x", "{}").startswith("405")
    cluster.kubectl("delete", "pod", "tf-notebook", "tf-notebook-3", "tf-notebook-4", "--now")
