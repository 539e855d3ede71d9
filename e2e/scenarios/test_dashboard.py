"""The chart's dashboard, as a person sees it who forwards its port."""

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
