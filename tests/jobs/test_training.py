"""Test what is rejected of a training, and that its file, its annotation and its options agree."""

from typing import Any

import msgspec
import pytest

from fenka.core.request import InvalidRequest
from fenka.jobs.job_spec import GpuResources
from fenka.jobs.training import TensorFlowRole, TrainingSpec
from fenka.jobs.workload import RoleSpec

VALID = TrainingSpec(name="mpi-dist", command=["mpirun", "a"])


def changed(**fields: Any) -> TrainingSpec:
    """Return the valid training with other fields."""
    return msgspec.structs.replace(VALID, **fields)


@pytest.mark.parametrize("name", ["a", "a" * 43, "mpi-dist", "a1", "a--b"])
def test_name_is_accepted_when_pods_can_have_it(name: str) -> None:
    """Test that name is accepted when pods can have it."""
    changed(name=name).validate()


def test_name_is_named_when_it_is_missing() -> None:
    """`--name` has no default."""
    with pytest.raises(InvalidRequest, match=r"^the job has no name: add --name NAME$"):
        changed(name="").validate()


@pytest.mark.parametrize("name", ["Mpi_Dist", "1job", "a" * 44, "a-", "-a", "a.b", "a\n", "ä"])
def test_name_is_rejected_when_no_pod_can_have_it(name: str) -> None:
    """Test that name is rejected when no pod can have it."""
    with pytest.raises(
        InvalidRequest, match=r"^invalid job name .*: use lowercase letters, digits"
    ):
        changed(name=name).validate()


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"command": []}, "no command given: write it after --"),
        ({"workers": 0}, "--workers must be from 1 to 4096, got 0"),
        ({"workers": -1}, "--workers must be from 1 to 4096, got -1"),
        ({"gpus": -1}, "--gpus must not be negative, got -1"),
        (
            {"gpus": 1, "gpu_mem": "4"},
            "--gpus takes whole cards: leave out --gpu-mem, or leave out --gpus",
        ),
        ({"gpu_core": 30}, "--gpu-core requires --gpu-mem"),
        ({"gpu_mem": "4", "cards": 0}, "--cards must be at least 1, got 0"),
        ({"sync_mode": "git"}, "--sync-mode git requires --sync-source URL"),
        ({"sync_source": "git://a/b.git"}, "--sync-source requires --sync-mode git"),
        (
            {"sync_mode": "rsync", "sync_source": "x"},
            "sync mode 'rsync' is not supported: use --sync-mode git, --code DIR or --data CLAIM:PATH",
        ),
        (
            {"sync_mode": "git", "sync_source": "https://host/"},
            "invalid --sync-source 'https://host/': expected the URL of a repository",
        ),
        (
            {"sync_mode": "git", "sync_source": "git://a/b", "code": "."},
            "--code and --sync-source both bring the code: use one of them",
        ),
        (
            {"env": {"GIT_SYNC_REV": "--upload-pack=touch /tmp/x"}},
            "invalid GIT_SYNC_REV '--upload-pack=touch /tmp/x': expected a branch, a tag or a commit",
        ),
        (
            {"data": ["pvc"]},
            "invalid --data 'pvc': expected CLAIM:PATH, for example training-data:/data",
        ),
        (
            {"data": ["../x:/data"]},
            "invalid --data '../x': name a claim by lowercase letters, digits, '-' and '.'",
        ),
        (
            {"checkpoint": "states:/a"},
            "invalid --checkpoint 'states:/a': name a claim by lowercase letters, digits, '-' and '.'",
        ),
        ({"time_limit_s": 0.0}, "--time-limit must be a positive time, got 0s"),
        ({"retry": -1}, "--retry must not be negative, got -1"),
        (
            {"ps": TensorFlowRole(replicas=1)},
            "--ps and its options are TensorFlow's: use fenka submit tensorflow",
        ),
        (
            {"kind": "tensorflow", "chief": TensorFlowRole(replicas=2)},
            "a training has at most one chief, got 2",
        ),
        (
            {"kind": "tensorflow", "ps": TensorFlowRole(gpus=1, gpu_mem="4", replicas=1)},
            "--ps-gpus takes whole cards: leave out --ps-gpu-mem, or leave out --ps-gpus",
        ),
    ],
)
def test_training_is_rejected_in_one_sentence(fields: dict[str, Any], sentence: str) -> None:
    """Test that training is rejected in one sentence."""
    with pytest.raises(InvalidRequest) as raised:
        changed(**fields).validate()
    assert str(raised.value) == sentence


@pytest.mark.parametrize("logdir", ["/logs", "/logs/run/1"])
def test_tensorboard_is_accepted_when_its_logs_are_on_a_claim(logdir: str) -> None:
    """Test that tensorboard is accepted when its logs are on a claim."""
    changed(tensorboard=True, data=["claim:/logs"], logdir=logdir).validate_tensorboard()


def test_tensorboard_is_rejected_when_a_path_only_begins_alike() -> None:
    """Test that tensorboard is rejected when a path only begins alike."""
    sentence = "--tensorboard requires --logdir inside a --data mount: /logs2 is local to each pod"
    with pytest.raises(InvalidRequest, match=sentence):
        changed(tensorboard=True, data=["claim:/logs"], logdir="/logs2").validate_tensorboard()


@pytest.mark.parametrize(
    ("command", "argv"),
    [
        (["mpirun python a.py && b"], ["sh", "-c", "mpirun python a.py && b"]),
        (["python", "-c", "print('a: b') # x"], ["python", "-c", "print('a: b') # x"]),
    ],
)
def test_command_is_a_script_when_it_is_one_word(command: list[str], argv: list[str]) -> None:
    """Test that command is a script when it is one word."""
    assert changed(command=command).argv == argv


@pytest.mark.parametrize(
    ("source", "project"),
    [
        ("https://github.com/tensorflow/benchmarks.git", "benchmarks"),
        ("git://git.default/tools/train", "train"),
        ("git@host:group/train.git", "train"),
        ("https://host/a.git/", "a"),
    ],
)
def test_project_is_the_last_part_of_the_repository(source: str, project: str) -> None:
    """Test that project is the last part of the repository."""
    assert changed(sync_source=source).project == project


@pytest.mark.parametrize(
    ("role", "gpu"),
    [
        (RoleSpec(), None),
        (RoleSpec(gpus=2), GpuResources(cards=2, whole=True)),
        (RoleSpec(gpu_mem="4", gpu_core=30), GpuResources("4", 30, "hard", 1)),
    ],
)
def test_gpu_is_none_when_nothing_is_requested(role: RoleSpec, gpu: GpuResources | None) -> None:
    """Test that gpu is none when nothing is requested."""
    assert role.gpu == gpu


def test_file_has_the_names_of_the_options() -> None:
    """Test that file has the names of the options."""
    text = b"""
        {"kind": "tensorflow", "name": "tf", "command": ["a"], "gpu-mem": "4", "data-dir": ["/d"],
         "ps": {"replicas": 1, "cpu": "2"}, "env": {"A": "b"}, "worker": {"memory": "1Gi"}}
    """
    spec = msgspec.json.decode(text, type=TrainingSpec)
    assert (spec.gpu_mem, spec.data_dir, spec.ps.cpu, spec.env) == ("4", ["/d"], "2", {"A": "b"})
    assert msgspec.json.decode(msgspec.json.encode(spec), type=TrainingSpec) == spec


def test_file_is_rejected_when_a_field_is_unknown() -> None:
    """Test that file is rejected when a field is unknown."""
    with pytest.raises(msgspec.ValidationError, match="gpumem"):
        msgspec.json.decode(b'{"gpumem": "4"}', type=TrainingSpec)
