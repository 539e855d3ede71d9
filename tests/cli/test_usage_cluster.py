"""`fenka usage` of a cluster: what its dashboard's pod has recorded, by way of the API server."""

import csv
import io
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest
from aiohttp import web

from fenka.core.metering import HOUR_US, Amounts, LineKind
from fenka.history.series import Holder, UsageRecord
from fenka.workstation.protocol import UsageRead
from tests.cli.command import Completed, fenka
from tests.fakes.api_server import FakeApiServer, in_thread

PROXY = "/api/v1/namespaces/fenka-system/services/fenka-dashboard-usage:http/proxy/usage"
TRAIN = Holder("uid-1", "train", team="vision", namespace="ada", kind="pod", asks="4308 MiB")


def record(
    kind: LineKind, hours: float, holder: Holder = TRAIN, paid: int | None = None
) -> UsageRecord:
    """A record of a T4 on one day of 2026."""
    amounts = Amounts(round(hours * HOUR_US), round(hours * HOUR_US) * 4308)
    return UsageRecord(20_700, kind, holder, "n", "Tesla T4", paid, amounts)


RECORDS = [
    record(LineKind.HELD, 2),
    record(LineKind.HELD, 1, paid=900_000),
    record(LineKind.IDLE, 3, Holder("")),
    record(LineKind.UNOBSERVED, 0.5, Holder("")),
]


class RecordedCluster:
    """A cluster whose dashboard answers this. asked: the queries that it got."""

    def __init__(self, read: UsageRead) -> None:
        self.asked: list[dict[str, str]] = []
        self._read = read
        self.server = FakeApiServer()
        self.server.before = self._before
        self.published = {"usage": "fenka-system/fenka-dashboard-usage:http"}

    async def _before(self, request: web.Request) -> web.Response | None:
        if request.path != PROXY:
            return None
        self.asked.append(dict(request.query))
        return web.Response(body=msgspec.json.encode(self._read))

    @contextmanager
    def serving(self, folder: Path) -> Iterator[Path]:
        """Yield the kubeconfig."""
        metadata = {"name": "fenka", "namespace": "kube-public"}
        self.server.put("configmaps", {"metadata": metadata, "data": self.published})
        with in_thread(self.server, folder) as kubeconfig:
            yield kubeconfig

    def ask(self, folder: Path, *words: str) -> Completed:
        """Run `fenka usage`."""
        with self.serving(folder) as kubeconfig:
            return fenka("usage", "--kubeconfig", str(kubeconfig), "--since", "2026-09-04", *words)


def a_cluster(prices: dict[str, int] | None = None, problem: str = "") -> RecordedCluster:
    """A cluster whose T4 cost 0.35 EUR an hour, but 0.9 where it was bought."""
    priced = {"Tesla T4": 350_000} if prices is None else prices
    return RecordedCluster(UsageRead(RECORDS, priced, "EUR", 20_701, problem))


def test_table_shows_teams_and_the_rest(tmp_path: Path) -> None:
    """2 h at the list's price and 1 h as paid: 0.70 + 0.90 EUR. Idle: 1.05. Unobserved: 0.175, rounded."""
    cluster = a_cluster()
    done = cluster.ask(tmp_path, "--by", "team", "--until", "2026-09-06")
    assert (done.exit_code, done.stderr) == (0, "")
    assert [line.split() for line in done.stdout.splitlines()] == [
        ["TEAM", "CARD·H", "GIB·H", "USED", "BUSY·H", "COST"],
        ["vision", "3.000", "12.621", "-", "-", "1.60", "EUR"],
        ["idle", "3.000", "12.621", "-", "-", "1.05", "EUR"],
        ["unobserved", "0.500", "2.104", "-", "-", "0.18", "EUR"],
        ["total", "6.500", "27.346", "-", "-", "2.82", "EUR"],
        ["recorded", "since", "2026-09-05"],
    ]
    assert cluster.asked == [{"since": "20700", "until": "20702", "by": "team"}]


def test_csv_and_json_have_the_same_rows(tmp_path: Path) -> None:
    """By namespace, with exact costs."""
    rows = list(
        csv.DictReader(
            io.StringIO(a_cluster().ask(tmp_path, "--by", "namespace", "-o", "csv").stdout)
        )
    )
    assert [(row["name"], row["kind"], row["cost"]) for row in rows] == [
        ("ada", "held", "1.6"),
        ("", "idle", "1.05"),
        ("", "unobserved", "0.175"),
    ]
    printed = json.loads(a_cluster().ask(tmp_path, "--by", "namespace", "-o", "json").stdout)
    assert printed["currency"] == "EUR"
    assert [row["card_hours"] for row in printed["rows"]] == [3, 3, 0.5]


def test_bill_names_the_cluster_and_each_price(tmp_path: Path) -> None:
    """FOCUS: a row for each day, pod and price."""
    cluster = a_cluster()
    rows = list(csv.DictReader(io.StringIO(cluster.ask(tmp_path, "-o", "focus").stdout)))
    assert [(row["ResourceName"], row["BilledCost"], row["PricingCategory"]) for row in rows] == [
        ("train", "0.7", "Standard"),
        ("train", "0.9", "Dynamic"),
        ("idle", "1.05", "Standard"),
        ("unobserved", "0.175", "Standard"),
    ]
    assert {row["BillingAccountId"] for row in rows} != {""}
    assert cluster.asked[0]["daily"] == "true"


@pytest.mark.parametrize(
    ("change", "words", "sentence"),
    [
        (
            "unpublished",
            (),
            "nothing records the usage of this cluster: upgrade fenka's chart with --set",
        ),
        ("no price", ("-o", "focus"), 'dashboard.page.usage.prices: {"Tesla T4": 0.35}'),
        ("garbage", (), "use the same release on both sides"),
        (
            "forbidden",
            (),
            "may not get services/proxy in namespace fenka-system: ask for the ClusterRole",
        ),
    ],
)
def test_sentence_says_what_to_do_when_there_is_no_usage(
    tmp_path: Path, change: str, words: tuple[str, ...], sentence: str
) -> None:
    """And the exit code is not 0."""
    cluster = a_cluster({} if change == "no price" else None)
    if change == "unpublished":
        cluster.published = {}
    if change in ("garbage", "forbidden"):

        async def before(request: web.Request) -> web.Response | None:
            if request.path != PROXY:
                return None
            if change == "garbage":
                return web.Response(text="<html>")
            refusal = {
                "kind": "Status",
                "reason": "Forbidden",
                "message": 'User "ada" cannot get resource "services/proxy" in API group "" in the '
                'namespace "fenka-system"',
            }
            return web.json_response(refusal, status=403)

        cluster.server.before = before
    done = cluster.ask(tmp_path, *words)
    assert done.exit_code not in (0, None)
    assert sentence in done.stderr
    assert done.stderr.count("\n") == 1


def test_problem_is_printed_beside_the_rows(tmp_path: Path) -> None:
    """A full volume costs the record, and is said."""
    done = a_cluster(problem="history is not recorded: the disk is full").ask(tmp_path)
    assert "the disk is full" in done.stderr
    assert "total" in done.stdout


def test_claim_is_named_when_nothing_records_because_the_pod_waits(tmp_path: Path) -> None:
    """A cluster without a default StorageClass: the chart is installed, and its pod never starts."""
    recorded = a_cluster()

    async def unavailable(request: web.Request) -> web.Response | None:
        if request.path != PROXY:
            return None
        status = {"message": "no endpoints available for service", "code": 503}
        return web.json_response(status, status=503)

    recorded.server.before = unavailable
    done = recorded.ask(tmp_path)
    assert done.exit_code == 1
    assert "dashboard.page.usage.storageClassName" in done.stderr
    assert "no endpoints available for service" in done.stderr
