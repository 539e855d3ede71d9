"""The chart's dashboard, as a person sees it who forwards its port."""

import csv
import io
import json
import re
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest

from e2e.cluster import ClusterError, wait_until
from e2e.scenarios.containers import installed_with, pod, wait_for_agent
from e2e.scenarios.installation import Installation
from e2e.scenarios.tenant import TENANT, Mallory

ALLOCATE = (
    "import ctypes as c, time; d=c.CDLL('libcuda.so.1'); x=c.c_void_p(); p=c.c_void_p(); d.cuInit(0); "
    "d.cuDevicePrimaryCtxRetain(c.byref(x),0); d.cuCtxSetCurrent(x); "
    "print(d.cuMemAlloc_v2(c.byref(p), c.c_size_t(3344 << 20)), flush=True); time.sleep(1000)"
)
ASK = (
    "import json, sys, urllib.error, urllib.request as r\n"
    "url, fields, *body = sys.argv[1:]\n"
    "ask = r.Request(url, *[text.encode() for text in body], headers=json.loads(fields))\n"
    "try: answer = r.urlopen(ask, timeout=10)\n"
    "except urllib.error.HTTPError as why: answer = why\n"
    "print(answer.status, answer.read().decode())"
)
HOST = "gpu.example.com"
"""The name by which browsers call the page behind its Ingress."""
WATCHER = f"""
apiVersion: v1
kind: ServiceAccount
metadata: {{name: watcher}}
---
apiVersion: rbac.authorization.k8s.io/v1
kind: RoleBinding
metadata: {{name: watcher}}
roleRef: {{apiGroup: rbac.authorization.k8s.io, kind: ClusterRole, name: view}}
subjects: [{{kind: ServiceAccount, name: watcher, namespace: {TENANT}}}]
"""
"""May look at the tenant's pods, and change nothing."""


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


def answer(
    installation: Installation, url: str, fields: Mapping[str, str], *body: str
) -> tuple[int, str]:
    """Return the status and the text of the server's answer to a request with these fields."""
    json_fields = json.dumps({"Content-Type": "application/json", **fields})
    printed = installation.cluster.run("python3", "-c", ASK, url, json_fields, *body)
    status, _, text = printed.partition(" ")
    return int(status), text


def ask(installation: Installation, url: str, *body: str) -> str:
    """Return what the page's server answers, after the status of a refusal."""
    status, text = answer(installation, url, {}, *body)
    return text if status == 200 else f"{status} {text}"


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
    (program,) = cluster.list("pods", "fenka", "app.kubernetes.io/component=dashboard")
    name = program["metadata"]["name"]
    cluster.kubectl("-n", "fenka", "delete", "pod", name, "--force", "--grace-period=0")
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


@dataclass(frozen=True)
class Page:
    """The page for those who have a token of the cluster, as an Ingress asks its Service."""

    installation: Installation
    url: str

    def ask(self, path: str, token: str, *body: str, **fields: str) -> tuple[int, str]:
        """Return the status and the text of an answer. fields: further ones; Host is that of the Ingress."""
        sent = {"Host": HOST, **fields} | ({"Authorization": f"Bearer {token}"} if token else {})
        return answer(self.installation, f"{self.url}/api/{path}", sent, *body)

    def token(self, account: str, *options: str) -> str:
        """Return a token of a ServiceAccount of the tenant's namespace."""
        words = ("-n", TENANT, "create", "token", account, *options)
        return self.installation.cluster.kubectl(*words).strip()

    def slices(self, token: str, node: str) -> set[tuple[str, str, int]]:
        """Return namespace, name and size of each slice of a node that the page shows."""
        status, text = self.ask("world", token)
        assert status == 200, text
        return {
            (tile["user"], tile["name"], tile["held_mib"])
            for card in json.loads(text)["cards"]
            if card["node"] == node
            for tile in card["slices"]
        }


@pytest.fixture
def page(installation: Installation, sharing_node: str) -> Iterator[Page]:
    """Install the page for people who sign in with tokens of the cluster."""
    cluster = installation.cluster
    own = {"enabled": True, "auth": "kubernetes", "hosts": [HOST]}
    values = {"enabled": False, "labels": {}, "page": own}
    with installed_with(installation, f"dashboard={json.dumps(values)}"):
        wait_for_agent(installation, sharing_node, 14)
        rollout = ("rollout", "status", "deployment/fenka-dashboard", "--timeout=120s")
        cluster.kubectl("-n", "fenka", *rollout)
        address = cluster.get("service", "fenka-dashboard", "fenka")["spec"]["clusterIP"]
        yield Page(installation, f"http://{address}")


@pytest.mark.full
def test_tenant_sees_and_changes_with_a_token_what_the_cluster_allows(
    installation: Installation, node: str, mallory: Mallory, page: Page
) -> None:
    """One card: 4 units of the tenant's, 4 of the namespace default, where another pod waits for 12."""
    cluster = installation.cluster
    mallory.create(pod("mine", "x=4:echo begun; exec sleep 100000"))
    cluster.apply(pod("quokka", "x=4:"))
    cluster.wait_for_pod("mine", TENANT)
    cluster.wait_for_pod("quokka")
    cluster.apply(pod("quokka-waits", "x=12:"))
    cluster.apply(WATCHER, TENANT)
    token, watcher = page.token("mallory"), page.token("watcher")
    shown = {(TENANT, "mine", 4308), ("", "other", 4308)}
    wait_until("both slices, one without a name", lambda: page.slices(token, node) == shown, 120)
    wait_until(
        "the request of others, counted",
        lambda: json.loads(page.ask("world", token)[1])["waiting_total"] == 1,
    )
    text = page.ask("world", token)[1]
    world = json.loads(text)
    assert [line["name"] for line in world["programs"]] == ["mine"]
    assert [line["user"] for line in world["people"]] == [TENANT]
    assert world["waiting"] == []
    theirs, mine = cluster.get("pod", "quokka")["metadata"]["uid"], mallory.uid("mine")
    assert not [word for word in ("quokka", theirs) if word in text]

    # Of others nothing can be asked for or changed, whatever its id.
    for path in (f"program/{theirs}", f"logs/{theirs}", "program/default%2Fquokka-waits"):
        assert page.ask(path, token)[0] == 404, path
    for path, body in ((f"stop/{theirs}", "{}"), (f"resize/{theirs}", '{"gpu_mem": "1"}')):
        assert page.ask(path, token, body)[0] == 404, path
    assert page.ask("what-if", token, "{}")[0] == 403
    assert cluster.get("pod", "quokka")["status"]["phase"] == "Running"

    # Who is nobody here reads nothing: the same token with another signature, one for others, none.
    changed = token[:-12] + ("A" if token[-12] != "A" else "B") + token[-11:]
    elsewhere = page.token("mallory", "--audience=https://elsewhere.example.com")
    for stranger in ("", changed, elsewhere, "x" * 2000):
        for path in ("world", "live", f"program/{mine}", f"logs/{mine}"):
            assert page.ask(path, stranger)[0] == 401, (path, stranger[:20])
        assert page.ask(f"stop/{mine}", stranger, "{}")[0] == 401

    # A name that was rebound to the Service, and a page of another site, have the token in vain.
    address = page.url.removeprefix("http://")
    for host in (
        "evil.example.com",
        f"{HOST}.evil.example.com",
        f"{HOST}@evil.example.com",
        address,
    ):
        status, sentence = page.ask("world", token, Host=host)
        assert (status, "mine" in sentence) == (421, False), host
    assert page.ask("world", token, Origin="http://evil.example.com")[0] == 403
    assert page.ask("world", token, Origin=f"http://{HOST}")[0] == 200

    # The API server decides who may change one's own.
    assert page.ask(f"program/{mine}", watcher)[0] == 200
    status, output = page.ask(f"logs/{mine}", watcher)
    assert (status, output.split()) == (200, ["begun"])
    status, sentence = page.ask(f"stop/{mine}", watcher, "{}")
    assert (status, "watcher" in sentence, "cannot delete" in sentence) == (403, True, True)
    assert page.ask(f"resize/{mine}", watcher, '{"gpu_mem": "2"}')[0] == 403
    assert page.ask(f"resize/{mine}", token, '{"gpu_mem": "2"}')[0] == 200
    wait_until("2 units", lambda: (TENANT, "mine", 2154) in page.slices(token, node))
    assert page.ask(f"stop/{mine}", token, "{}")[0] == 200

    def gone() -> bool:
        try:
            return mallory.uid("mine") != mine
        except ClusterError as why:
            return "NotFound" in str(why)

    wait_until("the end of the tenant's pod", gone)
    # A token that is withdrawn counts for half a minute more.
    cluster.kubectl("-n", TENANT, "delete", "serviceaccount", "watcher")
    wait_until("no answer to a withdrawn token", lambda: page.ask("world", watcher)[0] == 401, 60)
