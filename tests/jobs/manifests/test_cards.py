"""Slices in the names of pods, as the scheduler reads them back."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from fenka.core.request import InvalidRequest, Memory, Request
from fenka.dialects.base import ContainerRequest, PodRequest
from fenka.dialects.registry import DIALECTS, WITH_HAMI, detect
from fenka.jobs.job_spec import GpuResources
from fenka.jobs.manifests.card_requests import CardRequest, card_request, requires_hami

UNITS, CORE = "aliyun.com/gpu-mem", "aliyun.com/gpu-core.percentage"
BLOCKS, SHARE = "tencent.com/vcuda-memory", "tencent.com/vcuda-core"
COUNT, MIB, SHARES = "nvidia.com/gpu", "nvidia.com/gpumem", "nvidia.com/gpucores"


def read(said: CardRequest) -> tuple[Request, int | None]:
    """Return what the scheduler reads, and up to which percentage idle time may be used."""
    pod = PodRequest((ContainerRequest("c", said.limits),), said.labels, said.annotations)
    dialect = detect(pod, WITH_HAMI)
    assert dialect is not None
    (part,) = dialect.parse(pod)
    return part.request, part.burst_percent


@pytest.mark.parametrize(
    ("gpu", "limits", "request_read"),
    [
        (GpuResources("4"), {UNITS: "4"}, Request(Memory(4, None))),
        (GpuResources("4", 30), {UNITS: "4", CORE: "30"}, Request(Memory(4, None), 30)),
        (GpuResources("4", cards=2), {UNITS: "8"}, Request(Memory(4, None), cards=2)),
        # Any share of one card.
        (GpuResources("4", 33), {BLOCKS: "16", SHARE: "33"}, Request(Memory(16, 256), 33)),
        (GpuResources("512MiB", 30), {BLOCKS: "2", SHARE: "30"}, Request(Memory(2, 256), 30)),
        # Exact sizes, and shares of several cards.
        (GpuResources("4000MiB"), {COUNT: "1", MIB: "4000"}, Request(Memory(4000))),
        (
            GpuResources("4000MiB", 33),
            {COUNT: "1", MIB: "4000", SHARES: "33"},
            Request(Memory(4000), 33),
        ),
        (
            GpuResources("4", 30, cards=2),
            {COUNT: "2", MIB: "4096", SHARES: "30"},
            Request(Memory(4096), 30, cards=2),
        ),
    ],
)
def test_slices_have_the_names_that_express_them(
    gpu: GpuResources, limits: dict[str, str], request_read: Request
) -> None:
    """The scheduler reads what was requested."""
    said = card_request(gpu)
    assert said.limits == limits
    assert read(said) == (request_read, None)
    assert requires_hami(gpu) == (MIB in limits)


@pytest.mark.parametrize(
    ("gpu", "request_read"),
    [
        (GpuResources("4", 30, "soft"), Request(Memory(4, None), 30)),
        (GpuResources("4", 33, "soft"), Request(Memory(16, 256), 33)),
        (GpuResources("4", 80, "weight"), Request(Memory(4, None))),
        (GpuResources("4", 33, "weight"), Request(Memory(16, 256))),
        (GpuResources("4000MiB", 33, "weight"), Request(Memory(4000))),
        (GpuResources("4", 30, "weight", cards=2), Request(Memory(4096), cards=2)),
    ],
)
def test_mode_is_an_annotation_beside_the_names_of_the_slice(
    gpu: GpuResources, request_read: Request
) -> None:
    """The limits are those of a hard share. Soft may use the whole card, and a weight reserves nothing."""
    said = card_request(gpu)
    hard = card_request(replace(gpu, core_mode="hard"))
    assert said == CardRequest(hard.limits, hard.labels, {"fenka.io/core-mode": gpu.core_mode})
    assert read(said) == (request_read, 100 if gpu.core_mode == "soft" else None)
    assert requires_hami(gpu) == (MIB in hard.limits)


def test_mode_is_refused_when_there_is_no_compute() -> None:
    """As on a workstation."""
    with pytest.raises(InvalidRequest, match="--gpu-core-mode weight requires --gpu-core"):
        card_request(GpuResources("4", 0, "weight"))


@given(
    memory=st.integers(1, 64).map(str) | st.integers(1, 65536).map(lambda mib: f"{mib}MiB"),
    core=st.integers(0, 99),
    cards=st.integers(1, 8),
)
def test_every_slice_is_what_was_requested_when_all_names_are_read(
    memory: str, core: int, cards: int
) -> None:
    """HAMi's names are used only where no others express it."""
    gpu = GpuResources(memory, core, cards=cards)
    request, _ = read(card_request(gpu))
    mib = int(memory.removesuffix("MiB")) * (1 if memory.endswith("MiB") else 1024)
    assert request.memory is not None
    assert (request.memory.nominal_mib(1024), request.compute, request.cards) == (mib, core, cards)
    if not requires_hami(gpu):
        said = card_request(gpu, hami=False)
        pod = PodRequest((ContainerRequest("c", said.limits),), said.labels)
        assert detect(pod, DIALECTS) is not None
