"""gpu-manager's names: the rules for parts and whole cards, the article's three jobs, its annotations."""

import pytest

from fenka.core.evaluate import place
from fenka.core.request import Memory, Placement, Request
from fenka.core.usage import UsageTotals
from fenka.dialects import gpu_manager
from fenka.dialects.base import InvalidRecord, PodRequest, SliceRequest
from fenka.dialects.gpu_manager import CEILING, CORE, MEMORY
from tests.dialects.builders import T4_MIB, V100_MIB, environment, node_totals, pod, share


def job(core: int | str, memory: int | str, **annotations: str) -> PodRequest:
    """One container."""
    return pod({CORE: core, MEMORY: memory}, annotations=annotations)


@pytest.mark.parametrize(
    ("core", "memory", "expected"),
    [
        (40, 24, Request(Memory(24, 256), compute=40)),
        (1, 1, Request(Memory(1, 256), compute=1)),
        ("99", "24", Request(Memory(24, 256), compute=99)),
        # whole cards: the memory is theirs, whatever is asked for
        (100, 64, Request(whole=True)),
        (100, 0, Request(whole=True)),
        (300, 1, Request(whole=True, cards=3)),
    ],
)
def test_container_gets_its_slices_and_environment(
    core: int | str, memory: int | str, expected: Request
) -> None:
    """100 is a card."""
    assert gpu_manager.parse(job(core, memory)) == (SliceRequest(("c0",), expected),)


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        (
            job(150, 64),
            "container c0 asks for 150 of tencent.com/vcuda-core: "
            "ask for less than 100, or for whole cards by a multiple of 100",
        ),
        (
            job(40, 0),
            "container c0 asks for a part of a card without tencent.com/vcuda-memory: ask for both",
        ),
        (
            job(0, 24),
            "container c0 asks for a part of a card without tencent.com/vcuda-core: ask for both",
        ),
        (job("x", 24), "'x' is no quantity"),
        (job(-1, 24), "container c0 asks for -1 of tencent.com/vcuda-core"),
        (job(102400, 1), None),
        (job(102500, 1), "the number of cards must be 1 to 1024, not 1025"),
        (
            job(40, 24, **{CEILING: "30"}),
            "annotation tencent.com/vcuda-core-limit is 30, less than the 40 that container c0 asks for: "
            "raise it or leave it out",
        ),
        (
            job(40, 24, **{CEILING: "101"}),
            "annotation tencent.com/vcuda-core-limit is '101': it is a percentage, 1 to 100",
        ),
        (
            job(40, 24, **{CEILING: "all"}),
            "annotation tencent.com/vcuda-core-limit is 'all': it is a percentage, 1 to 100",
        ),
        (
            pod({CORE: 40, MEMORY: 24}, init=({CORE: 40, MEMORY: 24},)),
            "its init container i0 asks for tencent.com/vcuda-core: only its containers can",
        ),
    ],
)
def test_impossible_pod_is_rejected_with_one_sentence(
    wrong: PodRequest, sentence: str | None
) -> None:
    """With what to do instead."""
    if sentence is None:
        gpu_manager.parse(wrong)
        return
    with pytest.raises(InvalidRecord) as why:
        gpu_manager.parse(wrong)
    assert str(why.value) == sentence


def test_burst_percent_is_none_when_cards_are_whole() -> None:
    """A whole card has no limits."""
    both = pod({CORE: 40, MEMORY: 24}, {CORE: 100}, annotations={CEILING: "80"})
    assert [part.burst_percent for part in gpu_manager.parse(both)] == [80, None]
    assert [part.burst_percent for part in gpu_manager.parse(job(40, 24))] == [None]


def test_three_jobs_of_the_article_share_two_cards() -> None:
    """100/64 has a V100 for itself, 40/24 and 30/24 share the other.

    A V100 of 16130 MiB has 16130 // 256 = 63 units: 24 of them are 16130 · 24 // 63 = 6144 MiB. On the
    shared one 40 + 30 = 70 percent and 24 + 24 = 48 of 63 units are held; 24 more units of memory do not
    fit (48 + 24 = 72), nor do 31 percent (70 + 31 = 101).
    """
    node, view = share(V100_MIB, V100_MIB), UsageTotals()
    assert node_totals(gpu_manager, node) == {CORE: 200, MEMORY: 126}
    landed = []
    for core, memory in ((100, 64), (40, 24), (30, 24)):
        (part,) = gpu_manager.parse(job(core, memory))
        found = place(view, part.request, "binpack", [node.node])
        assert isinstance(found, Placement)
        view.add(found)
        landed += [(it.card, it.memory_mib, it.compute) for it in found.slices]
    assert landed == [(0, 16130, 100), (1, 6144, 40), (1, 6144, 30)]
    for core, memory, why in ((30, 24, "memory"), (31, 1, "compute")):
        (part,) = gpu_manager.parse(job(core, memory))
        refused = place(view, part.request, "binpack", [node.node])
        assert not isinstance(refused, Placement)
        assert refused.sentence() == (f"no GPU fits: 1 of 2 has too little {why}, 1 is taken whole")


GOLDEN = {
    "tencent.com/predicate-gpu-idx-0": "1",
    "tencent.com/predicate-gpu-idx-2": "0,2",
    "tencent.com/predicate-time": "1700000000000000000",
    "tencent.com/predicate-node": "gpu-1",
    "tencent.com/gpu-assigned": "false",
    "fenka.io/cards": '{"1":"GPU-1","0":"GPU-0","2":"GPU-2"}',
}


def test_placement_is_unchanged_when_encoded_and_decoded() -> None:
    """Containers are numbered as in the spec, those without a card too."""
    node = share(T4_MIB, T4_MIB, T4_MIB)
    asked = pod({CORE: 40, MEMORY: 24}, {}, {CORE: 200})
    first, second = gpu_manager.parse(asked)
    view = UsageTotals()
    placements = []
    for part, index in ((first, 1), (second, None)):
        cards = [it for it in node.node.cards if index in (None, it.index)]
        only = type(node.node)("gpu-1", tuple(cards))
        found = place(view, part.request, "binpack", [only])
        assert isinstance(found, Placement)
        view.add(found)
        placements.append(found)
    written = gpu_manager.encode(asked, node, placements, 1_700_000_000_000_000_000)
    assert written == GOLDEN
    again = PodRequest(asked.containers, {}, GOLDEN)
    assert gpu_manager.decode(again, gpu_manager.parse(again), node) == tuple(placements)
    assert [environment(gpu_manager, again, node, placements, f"c{n}") for n in range(3)] == [
        {"NVIDIA_VISIBLE_DEVICES": "GPU-1"},
        {},
        {"NVIDIA_VISIBLE_DEVICES": "GPU-0,GPU-2"},
    ]


@pytest.mark.parametrize(
    ("annotations", "sentence"),
    [
        (
            {"tencent.com/predicate-gpu-idx-0": "x"},
            "annotation tencent.com/predicate-gpu-idx-0 names no cards: 'x'",
        ),
        (
            {"tencent.com/predicate-gpu-idx-1": "0"},
            "annotation tencent.com/predicate-gpu-idx-0 names no cards: ''",
        ),
        (
            {"tencent.com/predicate-gpu-idx-0": "7"},
            "the pod's card 7 is not one of the 1 of its node",
        ),
        (
            {"tencent.com/predicate-gpu-idx-0": "0,0"},
            "the pod's record names the cards 0,0, it asks for 1 different ones",
        ),
        (
            {"tencent.com/predicate-gpu-idx-0": "0", "fenka.io/cards": '{"0":"GPU-9"}'},
            "the pod's card 0 was 'GPU-9' and is now 'GPU-0'",
        ),
        (
            {"tencent.com/predicate-gpu-idx-0": "0", "fenka.io/cards": "[]"},
            "annotation fenka.io/cards of the pod is not understood: Expected `object`, got `array`",
        ),
    ],
)
def test_decoding_raises_invalid_record_when_record_is_impossible(
    annotations: dict[str, str], sentence: str
) -> None:
    """Are told, not guessed at."""
    asked = job(40, 24, **annotations)
    with pytest.raises(InvalidRecord) as why:
        gpu_manager.decode(asked, gpu_manager.parse(asked), share(T4_MIB))
    assert str(why.value) == sentence


def test_decoding_returns_none_when_there_is_no_record() -> None:
    """The pod is not placed yet."""
    asked = job(40, 24)
    assert gpu_manager.decode(asked, gpu_manager.parse(asked), share(T4_MIB)) is None


def test_metrics_have_gpu_managers_names() -> None:
    """As gpu-manager's own /metric has them."""
    assert [(it.name, it.label) for it in gpu_manager.METRICS] == [
        ("container_gpu_utilization", "gpu"),
        ("container_request_gpu_utilization", "req_of_gpu"),
        ("container_gpu_memory_total", "gpu_memory"),
        ("container_request_gpu_memory", "req_of_gpu_memory"),
    ]
