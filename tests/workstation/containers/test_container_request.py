"""What a container requests, read from files that are its own."""

import contextlib
import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fenka.jobs.job_spec import GpuResources
from fenka.workstation.containers.container_request import (
    DeviceRequest,
    InvalidContainer,
    read_request,
)
from fenka.workstation.containers.hook_receiver import MAX_CONFIG_BYTES

ID = "0123456789abcdef" * 4


def state(**fields: Any) -> bytes:
    """Return an OCI state."""
    return json.dumps(
        {"ociVersion": "1.0.2", "id": ID, "pid": 7, "bundle": "/b", **fields}
    ).encode()


def config(*environment: str, annotations: dict[str, str] | None = None, devices: int = 1) -> bytes:
    """Return a bundle's config.json."""
    hook = {"path": "/var/lib/fenka/workstation/1/fenka-hook", "args": ["fenka-hook", "slice=1"]}
    document = {
        "process": {"args": ["python", "train.py"], "env": ["PATH=/bin", *environment]},
        "annotations": annotations or {},
        "hooks": {"createRuntime": [{"path": "/other"}, *[hook] * devices]},
        "linux": {"namespaces": [{"type": "pid"}]},
    }
    return json.dumps(document).encode()


def read(device: str, *environment: str, **annotations: str) -> DeviceRequest:
    """Return the request of a container. annotations: underscores stand for dashes."""
    names = {f"fenka.io/{name.replace('_', '-')}": value for name, value in annotations.items()}
    return read_request(device, state(), config(*environment, annotations=names))


@pytest.mark.parametrize(
    ("device", "environment", "resources"),
    [
        ("slice=4", [], GpuResources("4")),
        ("slice=6GiB", [], GpuResources("6GiB")),
        ("slice=4", ["FENKA_GPU_MEM=4", "FENKA_CARDS=2"], GpuResources("4", cards=2)),
        ("slice=any", ["FENKA_GPU_MEM=4096MiB"], GpuResources("4096MiB")),
        (
            "slice=any",
            ["FENKA_GPU_MEM=4", "FENKA_GPU_CORE=30%", "FENKA_GPU_CORE_MODE=soft"],
            GpuResources("4", 30, "soft"),
        ),
        # NVIDIA's variable is in MiB, and the last choice.
        ("slice=any", ["NVIDIA_GPU_MEMORY_LIMIT=2048"], GpuResources("2048MiB")),
        ("slice=any", ["NVIDIA_GPU_MEMORY_LIMIT=2048", "FENKA_GPU_MEM=1"], GpuResources("1")),
        ("slice=4", ["NVIDIA_GPU_MEMORY_LIMIT=2048"], GpuResources("4")),
        ("card=2", [], GpuResources(cards=2, whole=True)),
    ],
)
def test_resources_are_those_of_device_and_environment(
    device: str, environment: list[str], resources: GpuResources
) -> None:
    """The device says how much; `any` leaves that to the environment."""
    assert read(device, *environment).spec.gpu == resources


@pytest.mark.parametrize(
    ("device", "environment", "sentence"),
    [
        ("slice=any", [], "needs a size: set FENKA_GPU_MEM=4"),
        ("slice=4", ["FENKA_GPU_MEM=5"], "'5' is another size than fenka.io/slice=4"),
        (
            "slice=4",
            ["FENKA_GPU_MEN=5"],
            "no parameter 'FENKA_GPU_MEN': did you mean FENKA_GPU_MEM",
        ),
        ("slice=4", ["FENKA_X=5"], "no parameter 'FENKA_X': leave it out"),
        # To look for a near name among this many characters would take the daemon's time.
        ("slice=4", [f"FENKA_GPU_MEM{'M' * 3_900_000}=5"], "MM': leave it out"),
        ("slice=4", ["FENKA_CARDS=two"], "FENKA_CARDS='two' is no whole number"),
        ("slice=4", ["FENKA_CARDS=0"], "FENKA_CARDS at least 1"),
        ("slice=4", ["FENKA_GPU_CORE=101"], "from 1 to 100"),
        ("slice=4", ["FENKA_GPU_CORE_MODE=fast"], "'fast' is not one of hard, soft, weight"),
        ("slice=4", ["FENKA_TIME_LIMIT=1y"], "FENKA_TIME_LIMIT='1y' is no time"),
        ("slice=4", ["FENKA_EVICTION_GRACE=soon"], "FENKA_EVICTION_GRACE='soon' is no time"),
        ("slice=4", ["FENKA_KEEP=1y"], "FENKA_KEEP='1y' is no time"),
        ("slice=4", ["FENKA_KEEP=11m"], "FENKA_KEEP=11m is too long: at most 10m"),
        ("slice=4", ["FENKA_WAIT=maybe"], "neither hold nor refuse"),
        ("slice=4", [f"FENKA_NAME={'n' * 257}"], "more than 256 characters"),
        ("card=1", ["FENKA_GPU_MEM=4"], "takes whole cards: leave out FENKA_GPU_MEM"),
        ("slab=1", [], "'slab=1' is no device of this fenka"),
        ("slice=any", ["NVIDIA_GPU_MEMORY_LIMIT=4G"], "NVIDIA_GPU_MEMORY_LIMIT='4G' is no whole"),
    ],
)
def test_invalid_parameter_is_refused_with_a_sentence(
    device: str, environment: list[str], sentence: str
) -> None:
    """The engine shows the sentence to the user who starts the container."""
    with pytest.raises(InvalidContainer) as why:
        read(device, *environment)
    assert sentence in str(why.value)


def test_image_cannot_set_priority_and_user() -> None:
    """ENV of an image reaches every container that is made from it."""
    request = read("slice=4", "FENKA_PRIORITY=9", "FENKA_USER=bob", "LD_PRELOAD=/x.so")
    assert (request.spec.priority, request.user) == (0, "")
    assert read("slice=4", priority="-3", user="bob").spec.priority == -3
    assert read("slice=4", user="bob").user == "bob"


def test_slice_is_kept_for_ten_minutes_at_most() -> None:
    """It counts as used meanwhile."""
    assert [read("slice=4", f"FENKA_KEEP={text}").keep_s for text in ("0", "30s", "10m")] == [
        0,
        30,
        600,
    ]
    assert read("slice=4").keep_s == 0


def test_annotation_comes_before_the_environment() -> None:
    """The environment may be the image's."""
    request = read("slice=any", "FENKA_GPU_MEM=9", "FENKA_WAIT=hold", gpu_mem="4", wait="refuse")
    assert (request.spec.gpu.memory, request.waits) == ("4", False)


def test_job_is_named_after_the_container() -> None:
    """The id is what people see of a container; a name of their own comes first."""
    assert read("slice=4").spec.name == "c-0123456789ab"
    request = read("slice=4", "FENKA_NAME=train", "FENKA_TEAM=a", "FENKA_TIME_LIMIT=2h30m")
    assert (request.spec.name, request.spec.team, request.spec.time_limit_s) == ("train", "a", 9000)
    assert request.spec.command == ["python", "train.py"]


def test_second_device_is_refused() -> None:
    """Each device's hook would take a slice."""
    with pytest.raises(InvalidContainer, match="several devices of fenka: name one"):
        read_request("slice=4", state(), config(devices=2))


@pytest.mark.parametrize(
    ("fields", "engine"),
    [
        ({"annotations": {"io.container.manager": "libpod"}}, "podman"),
        ({"annotations": {"nerdctl/name": "a"}}, "nerdctl"),
        ({"bundle": "/run/containerd/io.containerd.runtime.v2.task/moby/0"}, "docker"),
        ({}, ""),
    ],
)
def test_engine_is_known_by_its_traces(fields: dict[str, Any], engine: str) -> None:
    """`fenka logs` names the command that prints a container's output."""
    assert read_request("slice=4", state(**fields), config()).engine == engine


@pytest.mark.parametrize(
    ("state_", "config_", "sentence"),
    [
        (b"", config(), "state is not understood"),
        (b'{"id":1}', config(), r"Expected `str`, got `int` - at `\$.id`"),
        (state(id="../../etc"), config(), "'../../etc' is no container's id"),
        (state(id="a" * 129), config(), "is no container's id"),
        (state(), b"[" * 100_000, "config.json is not understood"),
        (state(), b'{"x":' * 100_000, "config.json is not understood"),
        (state(), b'{"process":{"env":"A=1"}}', "Expected `array`"),
        (state(), b"\xff{}", "config.json is not understood"),
        (state(), b" " * (MAX_CONFIG_BYTES + 1), "config.json has more than 4 MiB"),
        (b" " * (1 << 20) + b"{}", config(), "state has more than 1 MiB"),
    ],
    ids=range(10),
)
def test_hostile_files_are_refused(state_: bytes, config_: bytes, sentence: str) -> None:
    """They come from users' containers."""
    with pytest.raises(InvalidContainer, match=sentence):
        read_request("slice=4", state_, config_)


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=20),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=9), inner, max_size=3)
    ),
    max_leaves=9,
)


@given(
    st.text(max_size=20),
    st.lists(st.sampled_from(["FENKA_GPU_MEM=", "FENKA_CARDS=", "X", "="]) | st.text(max_size=9)),
    st.dictionaries(st.text(max_size=9).map("fenka.io/".__add__) | st.text(), st.text(max_size=9)),
    ANYTHING,
)
def test_any_content_gives_a_valid_request_or_a_sentence(
    device: str, environment: list[str], annotations: dict[str, str], other: Any
) -> None:
    """Nothing else leaves the parser, and a request can be recorded."""
    document = {"process": {"env": environment}, "annotations": annotations, "other": other}
    with contextlib.suppress(InvalidContainer):
        request = read_request(device, state(), json.dumps(document).encode())
        assert msgspec.json.decode(msgspec.json.encode(request.spec)) is not None
        assert request.spec.gpu.cards >= 1
