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


@pytest.mark.process
def test_trace_gives_the_allocation_by_load(tmp_path: Path) -> None:
    """500 of 1,000 parts are allocated when 1,300 have arrived."""
    result = of_trace(tmp_path, "--policy", "bestfit", "-o", "json")
    found = json.loads(result.stdout)
    assert {key: found[key] for key in ("load", "allocation", "refused")} == {
        **{"load": [130], "allocation": [50.0], "refused": 1},
    }
    assert (found["without_cards"], found["refused_though_fitting"]) == ("policy", 0)
    table = of_trace(tmp_path, "--runs", "2", "--processes", "2").stdout.splitlines()
    # Of the half that is free a pod of 0.8 cards can use nothing, one of 0.5 all: each half of the trace.
    assert table[:2] == [
        "ARRIVED %  ALLOCATED %  DEVIATION  FRAGMENTED %",
        "130        50.00        0.00       50.00",
    ]
    assert table[2].startswith("bid-price, 2 runs: 2 pods refused, the first when 130.0 % had")


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("--policy", "best"), "--policy must be one of binpack, "),
        (("--without-cards", "kube"), "--without-cards must be one of policy, elsewhere, kube-sch"),
        (("--look-ahead", "17"), "--look-ahead must be 1 to 16, not 17"),
        (("--runs", "0"), "--runs must be 1 to 1000, not 0"),
        (("--by-time",), "--by-time takes the order from the pods' times"),
        (("--topology-level", "rack"), "--topology-level are for --by-time: add it"),
        (("--faster", "2"), "--faster, --known-times and --topology-level are for --by-time"),
        (("--faster", "nan"), "--faster must be 1e-06 to 1e+09, not nan"),
        (("--plot", "x.pdf"), "--plot writes .svg or .png, not .pdf: name the file so"),
        (("--plot", "/nowhere/x.svg"), "/nowhere/x.svg: No such file or directory"),
        (("--add-nodes", "t4=1"), "--add-nodes, --snapshot and --case are about a cluster"),
    ],
)
def test_options_of_a_trace_are_checked(
    tmp_path: Path, words: tuple[str, ...], sentence: str
) -> None:
    """One sentence each."""
    result = of_trace(tmp_path, *words)
    assert result.exit_code in (1, 2)
    assert sentence in result.stderr
    assert result.stderr.count("\n") == 1


TIMED = """name,cpu_milli,memory_mib,num_gpu,gpu_milli,creation_time,deletion_time,scheduled_time
half,1000,10,1,500,0,100,0
most,1000,10,1,800,10,40,20
huge,1000,10,2,1000,20,30,
"""


def by_time(folder: Path, *words: str) -> Completed:
    """Replay three pods on one card: the second waits from 10 to 100, the third fits nowhere."""
    (folder / "nodes.csv").write_text(NODES)
    (folder / "pods.csv").write_text(TIMED)
    files = ("--nodes", folder / "nodes.csv", "--pods", folder / "pods.csv")
    return fenka("simulate", *map(str, files), "--by-time", *words)


def test_replay_by_time_gives_waiting_times(tmp_path: Path) -> None:
    """0.5 cards for 100 s and 0.8 for 20 s are 66 of 120: 55 %. In the trace the second waited 10 s."""
    result = by_time(tmp_path, "--policy", "binpack")
    assert (result.exit_code, result.stderr) == (0, "")
    lines = result.stdout.splitlines()
    assert lines[:3] == [
        "WAITED  PODS    MEAN    MEDIAN  95 %    MAX",
        "here    1 of 2  45.0 s  45.0 s  90.0 s  90.0 s",
        "trace   1 of 2  5.0 s   5.0 s   10.0 s  10.0 s",
    ]
    assert lines[3].startswith(
        "binpack: 55.00 % of the cards allocated on average, 1 pods never fit"
    )


def test_replay_by_time_says_how_many_gangs_were_in_one_rack(tmp_path: Path) -> None:
    """One gang of two, on the only card of each of two racks in one zone."""
    (tmp_path / "nodes.csv").write_text(
        "sn,cpu_milli,memory_mib,gpu,model,zone,rack\na,8000,1000,1,T4,z,r1\nb,8000,1000,1,T4,z,r2\n"
    )
    pods = ["name,cpu_milli,memory_mib,num_gpu,gpu_milli,creation_time,deletion_time,gang"]
    pods += [f"{name},1000,10,1,1000,0,10,g" for name in ("one", "other")]
    (tmp_path / "pods.csv").write_text("\n".join(pods) + "\n")
    words = (
        "simulate",
        "--nodes",
        str(tmp_path / "nodes.csv"),
        "--pods",
        str(tmp_path / "pods.csv"),
    )
    levels = ("--by-time", "--topology-level", "zone", "--topology-level", "rack")
    result = fenka(*words, *levels)
    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout.splitlines()[3:5] == [
        "100.0 % of the gangs are in one zone",
        "0.0 % of the gangs are in one rack",
    ]
    document = json.loads(fenka(*words, *levels, "-o", "json").stdout)
    assert document["gangs_in_one"] == {"zone": 100.0, "rack": 0.0}
    result = fenka(*words, "--by-time", "--topology-level", "row")
    assert result.exit_code == 2
    assert "has no column row" in result.stderr


@pytest.mark.process
def test_runs_in_processes_and_json_are_the_same_again(tmp_path: Path) -> None:
    """The seeds decide, not the processes."""
    documents = []
    for processes in ("1", "2"):
        words = ("--policy", "random", "--runs", "2", "--processes", processes, "-o", "json")
        document = json.loads(by_time(tmp_path, *words).stdout)
        del document["ms_per_pod"]
        documents.append(document)
    assert documents[0] == documents[1]
    assert documents[0]["waits"]["pods"] == 4
    assert len(documents[0]["samples"]) == 200


@pytest.mark.parametrize("timed", [True, False])
def test_plots_are_drawn_again_alike(tmp_path: Path, timed: bool) -> None:
    """As SVG with its titles as text, and as PNG."""
    run = by_time if timed else of_trace
    contents = []
    for name in ("a.svg", "b.svg", "c.png"):
        result = run(tmp_path, "--policy", "binpack", "--plot", str(tmp_path / name))
        assert (result.exit_code, result.stderr) == (0, "")
        contents.append((tmp_path / name).read_bytes())
    assert contents[0] == contents[1]
    assert contents[2].startswith(b"\x89PNG")
    titles = ("Cards", "Waiting times") if timed else ("Allocation",)
    assert all(f">{title}<" in contents[0].decode() for title in (*titles, "Fragmentation"))


def saved(server: FakeApiServer, folder: Path, *words: str) -> Path:
    """Write a cluster into a file."""
    with in_thread(server, folder) as kubeconfig:
        result = fenka("snapshot", *words, "--kubeconfig", str(kubeconfig))
    assert (result.exit_code, result.stderr) == (0, "")
    path = folder / "cluster.json"
    path.write_text(result.stdout)
    return path


def full_cluster() -> FakeApiServer:
    """Return a node with 10 of 14 units free, and three pods of 7, 6 and 4 units, the oldest first."""
    status = unschedulable("0/1 nodes are available")
    waiting_pods = []
    for number, count in enumerate((7, 6, 4)):
        made = pod(f"p{number}", {**units(count), "cpu": 1}, status=status)
        made["metadata"]["creationTimestamp"] = f"2026-01-01T00:00:0{number}Z"
        waiting_pods.append(made)
    server = FakeApiServer.of(
        nodes=[node_json("gpu-1", 15079)],
        pods=[pod("holder", units(4), node="gpu-1", annotations=on_card(0, 4)), *waiting_pods],
        daemonsets=[],
    )
    server.absent = {"podgroups"}
    return server


@pytest.mark.parametrize(
    ("words", "started", "reason"),
    [
        # 10 units are free: the planner serves two pods, 6 and 4. In the order of the queue 7 comes first.
        ((), {"p1", "p2"}, "no group may grow"),
        (("--policy", "binpack"), {"p0"}, "no GPU fits: 1 of 1 has too little memory"),
        (("--add-nodes", "gpu-1=1", "--policy", "spread"), {"p0", "p1", "p2"}, ""),
        (("--add-nodes", "gpu-1=1"), {"p0", "p1", "p2"}, ""),
    ],
)
def test_saved_cluster_answers_what_would_start(
    words: tuple[str, ...], started: set[str], reason: str, tmp_path: Path
) -> None:
    """By the planner, or by a policy in the order of the queue."""
    path = saved(full_cluster(), tmp_path, "--keep-names")
    result = fenka("simulate", "--snapshot", str(path), *words, "-o", "json")
    assert (result.exit_code, result.stderr) == (0, "")
    plan = json.loads(result.stdout)
    assert {each["request"] for each in plan["placements"]} == {f"default/{n}" for n in started}
    assert all(reason in each["why"] for each in plan["unserved"])


def test_saved_cluster_has_no_names(tmp_path: Path) -> None:
    """Unless they are asked for; the answer names pseudonyms."""
    path = saved(full_cluster(), tmp_path)
    assert "gpu-1" not in path.read_text()
    result = fenka("simulate", "--snapshot", str(path), "--policy", "fgd")
    assert result.stdout.splitlines()[:3] == [
        "NODE    PRICE  PODS",
        "node-1  -      namespace-1/pod-2",
        "1 of 3 pending pods would start",
    ]


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ('"format": "fenka.snapshot/1"', "is no snapshot of a cluster: Invalid enum value"),
        ('"uid": ', "a node has no UID: add it"),
        ('"namespace": "default"', "the pod 'holder' has no namespace: add it"),
        ('"creationTimestamp": "2026-01-01T00:00:00Z"', "the pod 'p0' has the time 'soon'"),
        ('"at": ', "at is 1e+300: it must be a time in seconds since 1970"),
    ],
)
def test_saved_cluster_of_somebody_else_is_not_trusted(
    change: str, sentence: str, tmp_path: Path
) -> None:
    """One sentence for each mistake."""
    path = saved(full_cluster(), tmp_path, "--keep-names")
    wrong = {
        '"format": "fenka.snapshot/1"': '"format": "fenka.snapshot/9"',
        '"uid": ': '"none": ',
        '"namespace": "default"': '"none": ""',
        '"creationTimestamp": "2026-01-01T00:00:00Z"': '"creationTimestamp": "soon"',
        '"at": ': '"at": 1e300, "fenka": ',
    }
    text = path.read_text()
    if change == '"at": ':
        lines = [line for line in text.splitlines() if '"fenka":' not in line]
        text = "\n".join(' "at": 1e300,' if line.startswith(' "at"') else line for line in lines)
    else:
        assert change in text
        text = text.replace(change, wrong[change])
    path.write_text(text)
    result = fenka("simulate", "--snapshot", str(path))
    assert (result.exit_code, result.stdout) == (2, "")
    assert sentence in result.stderr
    assert result.stderr.count("\n") == 1


def test_odd_files_are_no_saved_cluster(tmp_path: Path) -> None:
    """A FIFO does not stop the command, and nothing that is nested without end."""
    import os

    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "deep").write_text("[" * 100_000)
    (tmp_path / "bytes").write_bytes(b"\xff\xfe")
    for name in ("fifo", "deep", "bytes", "missing"):
        result = fenka("simulate", "--snapshot", str(tmp_path / name))
        assert result.exit_code == 2
        assert result.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("--policy", "fgd", "--add-nodes", "a=1"), "--policy needs the whole cluster"),
        (("--snapshot", "a", "--case", "b"), "--snapshot and --case are two clusters"),
        ((), "say what to simulate"),
    ],
)
def test_options_of_clusters_are_checked(words: tuple[str, ...], sentence: str) -> None:
    """One sentence each."""
    result = fenka("simulate", *words)
    assert result.exit_code == 2
    assert sentence in result.stderr
