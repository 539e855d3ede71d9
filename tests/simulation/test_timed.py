"""A trace is replayed by its timestamps: pods come, wait, start and end."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fenka.core.policies.candidates import TargetPolicy
from fenka.core.policies.scores import SCORES
from fenka.core.policies.target import ExpectedWorkload
from fenka.core.queue import Fairness, PendingRequest
from fenka.core.request import Memory, Request
from fenka.simulation.timed import TimedOptions, TimedOutcome, VirtualQueue, Waits, replay_times
from fenka.simulation.trace import InvalidTrace, Trace, read_trace

NODES = "sn,cpu_milli,memory_mib,gpu,model\na,8000,1000,2,T4\n"
HEADER = (
    "name,cpu_milli,memory_mib,num_gpu,gpu_milli,"
    "creation_time,deletion_time,scheduled_time,"
    "gang,user,priority"
)


def trace(folder: Path, *rows: str, nodes: str = NODES) -> Trace:
    """Write and read a trace. rows: cards, thousandths, creation, deletion, start, gang, user, priority."""
    (folder / "nodes.csv").write_text(nodes)
    lines = []
    for number, row in enumerate(rows):
        count, parts, *times = row.split(",")
        lines.append(",".join((f"p{number}", "1000", "10", count, parts, *times)))
    (folder / "pods.csv").write_text("\n".join((HEADER, *lines)) + "\n")
    return read_trace(folder / "nodes.csv", folder / "pods.csv")


def replayed(read: Trace, policy: str = "binpack", **options: object) -> TimedOutcome:
    """Replay it."""
    return replay_times(read, read.nodes, TimedOptions(policy, **options))  # type: ignore[arg-type]


@pytest.mark.parametrize("policy", sorted(SCORES))
def test_pods_wait_until_cards_are_free(policy: str, tmp_path: Path) -> None:
    """Both cards are taken from 0 to 100, so those of 10 and 20 start at 100.

    The third runs for 50 s, the time from its start in the trace (30) to its end (80), not from its creation.
    """
    read = trace(tmp_path, "2,1000,0,100,0,,,", "1,1000,10,60,10,,,", "1,1000,20,80,30,,,")
    outcome = replayed(read, policy)
    assert outcome.seconds == (0.0, 90.0, 80.0)
    assert (outcome.refused, outcome.waits.waited) == (0, 2)
    assert outcome.recorded == Waits(3, 1, 10 / 3, 0.0, 10.0, 10.0)
    # 2 cards for 100 s, then 2 for 50 s, of 2 cards for 150 s.
    assert outcome.allocated == pytest.approx(100.0)
    assert outcome.samples[-1].at == 150.0


def test_allocation_is_a_mean_over_time(tmp_path: Path) -> None:
    """One of two cards for 100 s, then half a card for 100 s: 50 and 25 percent."""
    outcome = replayed(trace(tmp_path, "1,1000,0,100,0,,,", "1,500,100,200,100,,,"))
    assert outcome.allocated == pytest.approx(37.5)
    assert [round(outcome.samples[at].allocated, 3) for at in (0, 99, 100, 199)] == [50, 50, 25, 25]


def test_gang_starts_whole_with_its_last_pod(tmp_path: Path) -> None:
    """Its pods come at 0 and 5; a card is taken until 50. Its cards are free again one after the other."""
    read = trace(
        tmp_path,
        *("1,1000,0,50,0,,,", "1,1000,0,20,0,g,,", "1,1000,5,45,5,g,,", "2,1000,60,70,60,,,"),
    )
    # The gang runs from 50 to 70 and 90: the last pod needs both cards.
    assert replayed(read).seconds == (0.0, 45.0, 45.0, 30.0)


def racks(folder: Path, *gangs: str) -> Trace:
    """Write and read a trace of five nodes with one card, r1 with a, b and c, r2 with d and e, in one zone.

    gangs: rows of pods: gang, creation, end, required and preferred level.
    """
    nodes = [f"{name},8000,1000,1,T4,z,{rack}" for name, rack in zip("abcde", "11122", strict=True)]
    (folder / "nodes.csv").write_text(
        "\n".join(("sn,cpu_milli,memory_mib,gpu,model,zone,rack", *nodes)) + "\n"
    )
    rows = []
    for number, row in enumerate(gangs):
        gang, created, ends, *levels = row.split(",")
        rows.append(f"p{number},100,10,1,1000,{created},{ends},{created},{gang},{','.join(levels)}")
    columns = HEADER.removesuffix(",user,priority") + ",required_topology,preferred_topology"
    (folder / "pods.csv").write_text("\n".join((columns, *rows)) + "\n")
    return read_trace(folder / "nodes.csv", folder / "pods.csv", ("zone", "rack"))


def test_gangs_are_in_one_rack_when_it_has_room(tmp_path: Path) -> None:
    """One of three, then one of two: both have a rack of their own; binpack would part the second one.

    A pod alone takes a, since all nodes are equal. With it the gang of three is in two racks.
    """
    pair, three = ["two,1,11,,"] * 2, ["three,2,12,,"] * 3
    outcome = replayed(racks(tmp_path, *pair, *three))
    assert outcome.gangs_in_one == {"zone": 100.0, "rack": 100.0}
    outcome = replayed(racks(tmp_path, ",0,10,,", *three, *pair))
    assert outcome.gangs_in_one == {"zone": 100.0, "rack": 50.0}
    assert outcome.waits.max_s == 8.0


def test_gang_waits_for_a_rack_that_it_requires(tmp_path: Path) -> None:
    """The pod alone leaves a at 10, and the gang of three needs a, b and c; the pair does not wait for it."""
    three, pair = ["three,2,12,rack,"] * 3, ["two,3,13,,zone"] * 2
    outcome = replayed(racks(tmp_path, ",0,10,,", *three, *pair))
    assert sorted(outcome.seconds) == [0.0, 0.0, 0.0, 8.0, 8.0, 8.0]
    assert outcome.gangs_in_one == {"zone": 100.0, "rack": 100.0}
    # A gang that no rack could ever hold is refused; in one zone it is.
    for level, refused in (("rack", 4), ("zone", 0)):
        assert replayed(racks(tmp_path, *[f"four,0,10,{level},"] * 4)).refused == refused


def test_levels_of_a_trace_must_be_columns_of_its_nodes(tmp_path: Path) -> None:
    """A pod that names another one, and a column that is not there."""
    with pytest.raises(
        InvalidTrace, match="'row' is no topology level: name the nodes' columns by"
    ):
        racks(tmp_path, "g,0,10,row,")
    racks(tmp_path, "g,0,10,,")
    with pytest.raises(InvalidTrace, match="has no column row"):
        read_trace(tmp_path / "nodes.csv", tmp_path / "pods.csv", ("row",))


def test_pods_that_never_fit_are_refused(tmp_path: Path) -> None:
    """Three cards on a node of two; a gang of three whole cards."""
    gang = ["1,1000,0,20,0,g,,"] * 3
    outcome = replayed(trace(tmp_path, "3,1000,0,10,0,,,", *gang, "1,1000,0,10,0,,,"))
    assert (outcome.refused, outcome.seconds) == (4, (0.0,))


def test_large_request_is_not_starved_and_short_ones_go_before_if_their_times_are_known(
    tmp_path: Path,
) -> None:
    """One card is taken until 100; a pod of 2 cards waits for it from 10 on, one of 1 card from 20 on.

    If times are known, the one that ends by 100 starts at once; one that runs longer waits for both.
    """
    rows = ("1,1000,0,100,0,,,", "2,1000,10,20,10,,,")
    short, long = (*rows, "1,1000,20,50,20,,,"), (*rows, "1,1000,20,150,20,,,")
    assert sorted(replayed(trace(tmp_path, *short)).seconds) == [0.0, 90.0, 90.0]
    assert sorted(replayed(trace(tmp_path, *short), known_times=True).seconds) == [0.0, 0.0, 90.0]
    assert sorted(replayed(trace(tmp_path, *long), known_times=True).seconds) == [0.0, 90.0, 90.0]


def test_priority_and_fair_share_order_the_queue(tmp_path: Path) -> None:
    """At 10 a card is free for one of three: the priority decides; between users, who has had less."""
    one = "sn,cpu_milli,memory_mib,gpu,model\na,8000,1000,1,T4\n"
    rows = ("1,1000,0,10,0,,x,", "1,1000,1,11,1,,x,", "1,1000,2,12,2,,y,", "1,1000,3,13,3,,x,5")
    read = trace(tmp_path, *rows, nodes=one)
    # 3 (priority 5) at 10, then by time 1 at 20 and 2 at 30.
    assert replayed(read).seconds == (0.0, 7.0, 19.0, 28.0)
    # x has had the card for 20 s, so y is first at 20.
    assert replayed(read, fairness=Fairness()).seconds == (0.0, 7.0, 18.0, 29.0)


def test_pods_come_as_many_times_as_fast(tmp_path: Path) -> None:
    """At 0 and 50 instead of 0 and 100, and the first runs until 100 as before."""
    read = trace(tmp_path, "2,1000,0,100,0,,,", "2,1000,100,110,100,,,")
    assert replayed(read).seconds == (0.0, 0.0)
    assert replayed(read, faster=2.0).seconds == (0.0, 50.0)


@pytest.mark.parametrize(
    ("row", "sentence"),
    [
        ("1,1000,,,,,,", "the pod 'p0' has no creation_time and deletion_time"),
        ("1,1000,x,5,1,,,", "pods.csv, line 2: creation_time must be seconds, not 'x'"),
        ("1,1000,9,5,,,,", "creation_time, scheduled_time and deletion_time must ascend"),
        ("1,1000,1,5,6,,,", "creation_time, scheduled_time and deletion_time must ascend"),
        ("1,1000,1,5,2,,,-3", "priority must be a whole number, not '-3'"),
        ("1,1000," + "9" * 400 + ",5,,,,", "creation_time must be seconds, not '99999"),
    ],
)
def test_mistakes_get_one_sentence(row: str, sentence: str, tmp_path: Path) -> None:
    """With the file and the line, where that is known."""
    with pytest.raises(InvalidTrace) as caught:
        replayed(trace(tmp_path, row))
    assert sentence in str(caught.value)
    assert "\n" not in str(caught.value)


@settings(deadline=None, max_examples=25)
@given(
    rows=st.lists(
        st.tuples(
            st.integers(0, 2),
            st.sampled_from([250, 500, 750]),
            st.integers(0, 50),
            st.integers(0, 30),
            st.sampled_from(["", "", "g", "h"]),
        ),
        min_size=1,
        max_size=12,
    ),
    policy=st.sampled_from(["binpack", "fgd", "bid-price", "random"]),
)
def test_replay_is_deterministic_and_all_pods_end(
    rows: list[tuple[int, int, int, int, str]],
    policy: str,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """All pods that could fit start; the same seed gives the same waits."""
    lines = [
        f"{cards},{1000 if cards > 1 else parts},{at},{at + runs},{at},{gang},,"
        for cards, parts, at, runs, gang in rows
    ]
    read = trace(tmp_path_factory.mktemp("trace"), *lines)
    outcomes = [replayed(read, policy, seed=7) for _ in range(2)]
    assert outcomes[0] == outcomes[1]
    assert all(0 <= each.allocated <= 100.001 for each in outcomes[0].samples)


def test_queue_without_pending_requests_starts_nothing() -> None:
    """It can be asked at any time; refused requests stay refused."""
    read = Request(Memory(1000), cpu_milli=1)
    virtual = VirtualQueue([], TargetPolicy("binpack", ExpectedWorkload(())), Fairness())
    assert virtual.schedule(0.0) == []
    virtual.arrive(PendingRequest("r", (read,), 0.0))
    assert (virtual.refused, virtual.pending) == (["r"], {})
