"""`fenka.io/core-mode`: what the compute that a pod requests means, in the names of every dialect."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fenka.core.evaluate import place
from fenka.core.ledger import Ledger
from fenka.core.request import (
    COMPUTE_MODES,
    ComputeMode,
    Memory,
    Placement,
    Request,
    reserved_percent,
)
from fenka.dialects import ack, gpu_manager, gpushare, hami
from fenka.dialects.base import CORE_MODE, NVIDIA_GPU, InvalidRecord, PodRequest
from fenka.dialects.registry import WITH_HAMI, detect
from tests.dialects.builders import T4_MIB, pod, share

ACK: dict[str, int | str] = {gpushare.MEMORY: 4, ack.CORE: 80}
TENCENT: dict[str, int | str] = {gpu_manager.CORE: 80, gpu_manager.MEMORY: 16}
HAMI: dict[str, int | str] = {NVIDIA_GPU: 1, hami.MEMORY: 4000, hami.CORES: 80}
WITHOUT_COMPUTE: list[dict[str, int | str]] = [
    {gpushare.MEMORY: 4},
    {gpu_manager.CORE: 100},
    {NVIDIA_GPU: 1},
    {NVIDIA_GPU: 1, hami.MEMORY: 4000},
    {NVIDIA_GPU: 1, hami.CORES: 100},
]
NODE = share(T4_MIB, T4_MIB)


def in_mode(mode: str, *containers: dict[str, int | str], **annotations: str) -> PodRequest:
    """A pod of these containers in a mode."""
    return pod(*containers, annotations={CORE_MODE: mode, **annotations})


def parts_of(asked: PodRequest) -> list[tuple[int, int | None, int, str]]:
    """Return what each part reserves, its ceiling, its weight and its mode."""
    dialect = detect(asked, WITH_HAMI)
    assert dialect is not None
    return [
        (part.request.compute, part.burst_percent, part.weight, part.core_mode)
        for part in dialect.parse(asked)
    ]


@pytest.mark.parametrize("limits", [ACK, TENCENT, HAMI], ids=["ack", "gpu-manager", "hami"])
@pytest.mark.parametrize(
    ("mode", "part"),
    [
        ("hard", (80, None, 0, "hard")),
        ("soft", (80, 100, 0, "soft")),
        ("weight", (0, None, 80, "weight")),
    ],
)
def test_compute_is_reserved_unless_it_is_a_weight(
    limits: dict[str, int | str], mode: str, part: tuple[int, int | None, int, str]
) -> None:
    """A soft share is guaranteed as a hard one is, and may use the whole card."""
    assert parts_of(in_mode(mode, limits)) == [part]
    assert parts_of(pod(limits)) == [(80, None, 0, "hard")]


@pytest.mark.parametrize("limits", [ACK, TENCENT, HAMI], ids=["ack", "gpu-manager", "hami"])
def test_container_gets_its_weight_and_nothing_is_reserved(limits: dict[str, int | str]) -> None:
    """The weight stands in the slice of the container, not in its pod's record."""
    asked = in_mode("weight", limits)
    dialect = detect(asked, WITH_HAMI)
    assert dialect is not None
    (part,) = dialect.parse(asked)
    placed = place(Ledger([NODE.node]), part.request, "binpack", [NODE.node])
    assert isinstance(placed, Placement)
    written = dialect.encode(asked, NODE, (placed,), 1)
    bound = PodRequest(asked.containers, {}, {**asked.annotations, **written})
    read = dialect.decode(bound, dialect.parse(bound), NODE)
    assert read == (placed,)
    (piece,) = dialect.container_slices(bound, NODE, read, "c0")
    assert piece == replace(placed.slices[0], compute=80)
    assert placed.slices[0].compute == 0


def test_each_container_has_a_weight_of_its_own() -> None:
    """A whole card beside them has none."""
    asked = in_mode("weight", TENCENT, {gpu_manager.CORE: 20, gpu_manager.MEMORY: 8})
    assert [weight for _, _, weight, _ in parts_of(asked)] == [80, 20]
    asked = in_mode("weight", TENCENT, {gpu_manager.CORE: 100})
    assert parts_of(asked) == [(0, None, 80, "weight"), (0, None, 0, "hard")]


@pytest.mark.parametrize(
    ("asked", "sentence"),
    [
        (in_mode("Weight", ACK), "annotation fenka.io/core-mode is 'Weight': write one of "),
        (in_mode("", TENCENT), "annotation fenka.io/core-mode is '': write one of hard, soft, we"),
        (in_mode("x" * 9999, HAMI), f"annotation fenka.io/core-mode is '{'x' * 40}': write one of"),
        (in_mode("a\nb", ACK), r"annotation fenka.io/core-mode is 'a\nb': write one of hard, soft"),
        *[
            (
                in_mode(mode, limits),
                f"annotation fenka.io/core-mode is {mode}, and no container requests a share of "
                "compute: request one beside the memory, or leave the annotation out",
            )
            for mode in COMPUTE_MODES
            for limits in WITHOUT_COMPUTE
        ],
        (
            in_mode("soft", TENCENT, **{gpu_manager.CEILING: "90"}),
            "annotations tencent.com/vcuda-core-limit and fenka.io/core-mode both say what its "
            "compute means: leave one of them out",
        ),
    ],
)
def test_pod_is_rejected_when_its_mode_is_invalid(asked: PodRequest, sentence: str) -> None:
    """In one sentence that says what to write."""
    dialect = detect(asked, WITH_HAMI)
    assert dialect is not None
    with pytest.raises(InvalidRecord) as why:
        dialect.parse(asked)
    assert str(why.value).startswith(sentence)
    assert len(str(why.value)) < 250


SHARES = st.tuples(st.sampled_from(COMPUTE_MODES), st.integers(1, 99), st.integers(1, 20))


@given(st.lists(SHARES, max_size=30))
def test_card_never_reserves_more_compute_than_it_has_whatever_the_modes(
    shares: list[tuple[ComputeMode, int, int]],
) -> None:
    """Guaranteed shares are at most 100 a card, weights are free, and removing undoes placing."""
    ledger, held = Ledger([NODE.node]), list[tuple[str, Placement, str, int]]()
    for number, (mode, percent, blocks) in enumerate(shares):
        limits: dict[str, int | str] = {gpu_manager.CORE: percent, gpu_manager.MEMORY: blocks}
        (part,) = gpu_manager.parse(in_mode(mode, limits))
        placed = place(ledger, part.request, "binpack", [NODE.node])
        assert part.request == Request(Memory(blocks, 256), reserved_percent(percent, mode))
        if isinstance(placed, Placement):
            ledger.assume(str(number), placed, 0)
            held.append((str(number), placed, mode, percent))
        for card in NODE.node.cards:
            on_card = [item for item in held if item[1].slices[0].uuid == card.uuid]
            guaranteed = sum(percent for _, _, mode, percent in on_card if mode != "weight")
            assert ledger.card_usage(NODE.node.name, card.uuid).compute == guaranteed <= 100
    for name, *_ in held:
        ledger.release(name)
    assert all(not ledger.card_usage(NODE.node.name, card.uuid).holders for card in NODE.node.cards)


@pytest.mark.parametrize(("mode", "reserved"), [("hard", 30), ("soft", 30), ("weight", 0)])
def test_weights_alone_reserve_nothing(mode: ComputeMode, reserved: int) -> None:
    """The rule that workstations and clusters share."""
    assert reserved_percent(30, mode) == reserved
