"""What is rejected of a service, and what its program, ports and replicas are."""

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fenka.core.request import InvalidRequest
from fenka.jobs.service import (
    ReplicaRange,
    ServiceSpec,
    check_versions,
    parse_replicas,
    parse_weights,
    weights_with,
)

VALID = ServiceSpec(name="bert", version="v1", command=["serve"], restful_port=5000, gpu_mem="3")
TENSORFLOW = ServiceSpec(
    kind="tensorflow", name="bert", version="v1", model_name="bert", model_path="/models/bert"
)
TRITON = ServiceSpec(kind="triton", name="bert", version="v1", model_repository="/models")


def changed(spec: ServiceSpec = VALID, **fields: Any) -> ServiceSpec:
    """Return a valid service with other fields."""
    return msgspec.structs.replace(spec, **fields)


@pytest.mark.parametrize(
    ("text", "least", "most"), [("1", 1, 1), ("2", 2, 2), ("1..4", 1, 4), ("0..1", 0, 1)]
)
def test_replicas_are_a_number_or_a_range(text: str, least: int, most: int) -> None:
    """A number is a range of one."""
    replicas = parse_replicas(text)
    assert replicas == ReplicaRange(least, most)
    assert replicas.scales == (least < most)
    assert str(replicas) == text


@pytest.mark.parametrize(
    "text",
    ["4..1", "", "0", "0..0", "-1", "1..", "..4", "1...4", "a", "1.5", "1..4..5", "²", "1\n"],
)
def test_replicas_are_rejected_when_they_are_no_range(text: str) -> None:
    """The sentence says what is expected."""
    with pytest.raises(InvalidRequest) as error:
        parse_replicas(text)
    assert str(error.value) == f"invalid --replicas {text!r}: expected N or MIN..MAX"


def test_replicas_are_bounded() -> None:
    """A mistyped number starts no thousand pods."""
    with pytest.raises(InvalidRequest, match="at most 1000 replicas, not 40000"):
        parse_replicas("1..40000")


@pytest.mark.parametrize("spec", [VALID, TENSORFLOW, TRITON, changed(version="202611221300")])
def test_valid_service_is_accepted(spec: ServiceSpec) -> None:
    """Each kind has what it requires, and its annotation describes it completely."""
    spec.validate()
    assert msgspec.json.decode(msgspec.json.encode(spec), type=ServiceSpec) == spec


@pytest.mark.parametrize(
    ("spec", "sentence"),
    [
        (
            changed(name="Bert"),
            "invalid service name 'Bert': use lowercase letters, digits and '-', starting with a letter, "
            "at most 43 characters",
        ),
        (
            changed(version="v1.0"),
            "invalid --version 'v1.0': use lowercase letters, digits and '-', at most 19 characters",
        ),
        (changed(version="v" * 20), f"invalid --version '{'v' * 20}': use lowercase letters"),
        (
            changed(version="gateway"),
            "invalid --version 'gateway': bert-gateway is the service's gateway, use another",
        ),
        (changed(target=0), "--target must be from 1 to 1000000, got 0"),
        (changed(up_after_s=-1), "--up-after must be from 0s to 1h, got -1s"),
        (changed(buffer_timeout_s=0), "--buffer-timeout must be from 1s to 1h, got 0s"),
        (
            changed(buffer_timeout_s=float("nan")),
            "--buffer-timeout must be from 1s to 1h, got nans",
        ),
        (changed(down_after_s=float("nan")), "--down-after must be from 0s to 1h, got nans"),
        (
            changed(health_path="healthz"),
            "--health-path must be an absolute path at --restful-port",
        ),
        (changed(restful_port=0, port=5000, health_path="/"), "--health-path must be an absolute"),
        (changed(data=["pvc"]), "invalid --data 'pvc': expected CLAIM:PATH, for example training"),
        (changed(env={"FENKA_X": "1"}), "invalid --env 'FENKA_X': a variable's name has letters"),
        (changed(command=[]), "no command given: write it after --"),
        (changed(restful_port=0), "no port given: use --restful-port or --port"),
        (changed(restful_port=0, metrics_port=80), "no port given: use --restful-port or --port"),
        (changed(restful_port=70000), "--restful-port must be from 1 to 65535, got 70000"),
        (changed(port=5000), "--restful-port and --port must differ, both are 5000"),
        (changed(replicas="4..1"), "invalid --replicas '4..1': expected N or MIN..MAX"),
        (changed(gpus=1), "--gpus takes whole cards: leave out --gpu-mem, or leave out --gpus"),
        (changed(gpu_mem="", gpu_core=30), "--gpu-core requires --gpu-mem"),
        (changed(TENSORFLOW, model_name=""), "fenka serve tensorflow requires --model-name"),
        (changed(TENSORFLOW, model_path=""), "fenka serve tensorflow requires --model-path"),
        (changed(TRITON, model_repository=""), "fenka serve triton requires --model-repository"),
        (changed(model_path="/m"), "--model-path is not an option of fenka serve custom"),
        (changed(TRITON, model_name="m"), "--model-name is not an option of fenka serve triton"),
    ],
)
def test_service_is_rejected_with_a_sentence(spec: ServiceSpec, sentence: str) -> None:
    """Each mistake is named, with what to do."""
    with pytest.raises(InvalidRequest) as error:
        spec.validate()
    assert str(error.value).startswith(sentence)


def test_programs_of_model_servers() -> None:
    """The slice is all that a model server sees, so it gets no share of the card's memory to take."""
    assert TENSORFLOW.argv == [
        "tensorflow_model_server",
        "--port=8500",
        "--rest_api_port=8501",
        "--model_name=bert",
        "--model_base_path=/models/bert",
    ]
    assert changed(TRITON, command=["--log-verbose=1"]).argv == [
        "tritonserver",
        "--http-port=8000",
        "--grpc-port=8001",
        "--metrics-port=8002",
        "--model-repository=/models",
        "--log-verbose=1",
    ]
    assert VALID.argv == ["sh", "-c", "serve"]
    assert changed(command=["serve", "--fast"]).argv == ["serve", "--fast"]


def test_ports_have_the_names_of_services() -> None:
    """Defaults are those of the model servers; options prevail."""
    assert VALID.ports == {"http-serving": 5000}
    assert TENSORFLOW.ports == {"http-serving": 8501, "grpc-serving": 8500}
    assert changed(TRITON, port=9001).ports == {
        "http-serving": 8000,
        "grpc-serving": 9001,
        "http-metrics": 8002,
    }


def test_weights_are_read_by_version() -> None:
    """Weights are percentages."""
    assert parse_weights(["v1:90", "v2:10"]) == {"v1": 90, "v2": 10}
    assert parse_weights(["v1:100", "v2:0"]) == {"v1": 100, "v2": 0}


@pytest.mark.parametrize(
    ("texts", "sentence"),
    [
        (["v1:90", "v2:20"], "version weights must add up to 100, got 110"),
        ([], "version weights must add up to 100, got 0"),
        (["v1"], "invalid version weight 'v1': expected VERSION:WEIGHT, for example v1:90"),
        (["v1:-1", "v2:101"], "invalid version weight 'v1:-1': expected VERSION:WEIGHT"),
        (["v1:1²"], "invalid version weight 'v1:1²': expected VERSION:WEIGHT"),
        (["V:100"], "invalid version weight 'V:100': expected VERSION:WEIGHT"),
        (["v1:50", "v1:50"], "version v1 is given twice: give each version one weight"),
    ],
)
def test_weights_are_rejected_with_a_sentence(texts: list[str], sentence: str) -> None:
    """Each mistake is named."""
    with pytest.raises(InvalidRequest) as error:
        parse_weights(texts)
    assert str(error.value).startswith(sentence)


@given(st.lists(st.text(max_size=8), max_size=3))
def test_weights_of_any_text_are_refused_or_add_up(texts: list[str]) -> None:
    """No text raises anything but a sentence."""
    try:
        weights = parse_weights(texts)
    except InvalidRequest:
        return
    assert sum(weights.values()) == 100


def test_versions_that_do_not_exist_are_refused() -> None:
    """The sentence lists those that do."""
    check_versions("bert", {"v1": 100}, ["v2", "v1"])
    with pytest.raises(InvalidRequest) as error:
        check_versions("bert", {"v1": 50, "v3": 50}, ["v2", "v1"])
    assert str(error.value) == "service bert has no version v3: existing versions are v1, v2"


def test_added_version_gets_no_requests_unless_nobody_else_does() -> None:
    """Somebody gives it a weight when it has proved itself."""
    assert weights_with(None, ["v1"], "v2") == {"v1": 100, "v2": 0}
    assert weights_with({"v1": 90, "v2": 10}, ["v1", "v2"], "v3") == {"v1": 90, "v2": 10, "v3": 0}
    assert weights_with({"v1": 0}, ["v1"], "v2") == {"v2": 100}
