"""`fenka simulate`: of a case and of a cluster, with and without an autoscaler."""

import json
from pathlib import Path

import pytest

from tests.autoscaler.cases import case, group, node, request
from tests.builders import Json, node_json, on_card, pod, units, unschedulable
from tests.cli.command import Completed, fenka
from tests.cli.test_autoscaler_cluster import cluster, waiting
from tests.fakes.api_server import FakeApiServer, in_thread

CASE = case(
    request("r", 4, count=4), request("big", 15), groups=[group(max=0)], nodes=[node("gpu-1", 8616)]
)


def of_case(tmp_path: Path, *words: str) -> Completed:
    """Run it on the case."""
    path = tmp_path / "case.json"
    path.write_text(json.dumps(CASE))
    return fenka("simulate", "--case", str(path), *words)


def of_cluster(server: FakeApiServer, folder: Path, *words: str) -> Completed:
    """Run it on a cluster. It writes nothing there."""
    before = server.version
    with in_thread(server, folder) as kubeconfig:
        result = fenka("simulate", *words, "--kubeconfig", str(kubeconfig))
    assert server.version == before
    return result


def daemon(cpu: int) -> Json:
    """Return a DaemonSet on all nodes."""
    container = {"name": "c", "resources": {"requests": {"cpu": cpu}}}
    return {
        "metadata": {"name": "d", "namespace": "ns", "uid": "d"},
        "spec": {"template": {"spec": {"containers": [container]}}},
    }


def test_answer_names_who_would_start_where(tmp_path: Path) -> None:
    """3 pods of 4 units fit a new T4 of 14, one what is free; the rows of nodes without pods are one."""
    result = of_case(tmp_path, "--add-nodes", "t4=4")
    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout.splitlines() == [
        "NODE        PRICE  PODS",
        "new:t4:0    4      3 x r",
        "3 x new:t4  4      -",
        "gpu-1       -      r",
        "4 of 5 pending pods would start, for 16 more an hour",
        "1 of big left out: 0/1 groups help: 1 cards too small (14 units, 15 wanted)",
    ]


def test_json_has_the_format_of_plans(tmp_path: Path) -> None:
    """With the nodes that were asked about."""
    plan = json.loads(of_case(tmp_path, "--add-nodes", "gpu-1=2", "-o", "json").stdout)
    assert (plan["format"], plan["cost"]) == ("fenka.plan/1", 0)
    assert plan["nodes"] == [{"group": "gpu-1", "count": 2}]
    assert len(plan["placements"]) == 4


@pytest.mark.parametrize(
    ("value", "sentence"),
    [
        ("x=1", "no group and no node is called 'x': name one of t4, gpu-1"),
        ("t4", "invalid --add-nodes 't4': write a group or node and a number, such as t4=2"),
        ("t4=-1", "invalid --add-nodes 't4=-1': write a group or node and a number, such as t4=2"),
        ("=1", "invalid --add-nodes '=1': write a group or node and a number, such as t4=2"),
        ("t4=0", "invalid --add-nodes 't4=0': ask for 1 to 1000 nodes"),
        ("t4=1001", "invalid --add-nodes 't4=1001': ask for 1 to 1000 nodes"),
        ("t4=" + "9" * 5000, "invalid --add-nodes 't4=9999"),
    ],
)
def test_bad_names_and_numbers_are_refused(value: str, sentence: str, tmp_path: Path) -> None:
    """In one sentence, with exit code 2."""
    result = of_case(tmp_path, "--add-nodes", value)
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith(f"fenka: {sentence}")
    assert result.stderr.count("\n") == 1


def test_group_that_is_out_of_stock_answers_all_the_same(tmp_path: Path) -> None:
    """Zone g is: the question is what such nodes would bring."""
    server = cluster(waiting("a"), waiting("b"))
    result = of_cluster(server, tmp_path, "--add-nodes", "t4:gn6i:g=1")
    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout.splitlines()[2:] == [
        "1 of 2 pending pods would start, for 4 more an hour",
        "1 of default/b left out: 0/1 groups help: 1 fixed at 1 node",
    ]


@pytest.mark.parametrize(("cpu", "started"), [(1, 3), (3, 2)])
def test_cluster_without_autoscaler_gets_nodes_like_its_own(
    cpu: int, started: int, tmp_path: Path
) -> None:
    """10 of its 14 units are free, so one pod of 7 starts there.

    The new node has no other pods, so its 14 units serve two. Its DaemonSet leaves 7 or 5 of 8 cores, and
    each pod wants 3.
    """
    asked = {**units(7), "cpu": 3}
    status = unschedulable("0/1 nodes are available")
    server = FakeApiServer.of(
        nodes=[node_json("gpu-1", 15079)],
        pods=[
            pod("holder", units(4), node="gpu-1", annotations=on_card(0, 4)),
            *(pod(name, asked, status=status) for name in "abc"),
        ],
        daemonsets=[daemon(cpu)],
    )
    server.absent = {"podgroups"}
    result = of_cluster(server, tmp_path, "--add-nodes", "gpu-1=1", "-o", "json")
    assert (result.exit_code, result.stderr) == (0, "")
    assert len(json.loads(result.stdout)["placements"]) == started


def test_nothing_pending_is_said(tmp_path: Path) -> None:
    """Without a table."""
    server = FakeApiServer.of(nodes=[node_json("gpu-1", 15079)], pods=[])
    server.absent = {"podgroups"}
    result = of_cluster(server, tmp_path, "--add-nodes", "gpu-1=1")
    assert (result.exit_code, result.stdout) == (0, "no pod is pending\n")


NODES = "sn,cpu_milli,memory_mib,gpu,model\na,8000,1000,1,T4\n"
PODS = "name,cpu_milli,memory_mib,num_gpu,gpu_milli\nhalf,1000,10,1,500\nmost,1000,10,1,800\n"


def of_trace(folder: Path, *words: str) -> Completed:
    """Run it on a trace of one card: a half arrives, then what does not fit beside it."""
    (folder / "nodes.csv").write_text(NODES)
    (folder / "pods.csv").write_text(PODS)
    (folder / "order.csv").write_text("name\nhalf\nmost\n")
    files = ("--nodes", folder / "nodes.csv", "--pods", folder / "pods.csv")
    order = ("--arrivals", folder / "order.csv")
    return fenka("simulate", *map(str, (*files, *order)), *words)


def test_trace_gives_the_allocation_by_load(tmp_path: Path) -> None:
    """500 of 1,000 parts are allocated when 1,300 have arrived."""
    result = of_trace(tmp_path, "--policy", "bestfit", "-o", "json")
    found = json.loads(result.stdout)
    assert {key: found[key] for key in ("load", "allocation", "refused")} == {
        **{"load": [130], "allocation": [50.0], "refused": 1},
    }
    assert (found["without_cards"], found["refused_though_fitting"]) == ("policy", 0)
    table = of_trace(tmp_path, "--runs", "2", "--processes", "2").stdout.splitlines()
    assert table[:2] == ["ARRIVED %  ALLOCATED %  DEVIATION", "130        50.00        0.00"]
    assert table[2].startswith("bid-price, 2 runs: 2 pods refused, the first when 130.0 % had")


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("--policy", "best"), "--policy must be one of binpack, "),
        (("--without-cards", "kube"), "--without-cards must be one of policy, elsewhere, kube-sch"),
        (("--look-ahead", "17"), "--look-ahead must be 1 to 16, not 17"),
        (("--runs", "0"), "--runs must be 1 to 1000, not 0"),
        (("--add-nodes", "t4=1"), "--add-nodes and --case are about a cluster"),
    ],
)
def test_options_of_a_trace_are_checked(
    tmp_path: Path, words: tuple[str, ...], sentence: str
) -> None:
    """One sentence each."""
    result = of_trace(tmp_path, *words)
    assert result.exit_code == 2
    assert sentence in result.stderr
