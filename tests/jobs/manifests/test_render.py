"""Test the objects of trainings: golden files, and what must hold for every training."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from fenka.core.request import InvalidRequest
from fenka.jobs.collection import Contents
from fenka.jobs.manifests.training_manifest import Rendered, render
from fenka.jobs.training import TensorFlowRole, TrainingSpec
from fenka.jobs.workload import RoleSpec
from fenka.views.workloads import TRAINERS
from tests.jobs.manifests.trainings import ALONE, CONTENTS, MPI, PYTORCH, TENSORFLOW, rendered_all

GOLDEN = Path(__file__).parent / "golden"
LABEL = re.compile(r"[a-z]([a-z0-9-]{0,61}[a-z0-9])?")
REFERENCE = re.compile(r"(?<!\$)\$\(([A-Za-z_]+)\)")

Json = dict[str, Any]


def objects(rendered: Rendered) -> list[Json]:
    """Return all objects; the files of the launch agent are tested elsewhere."""
    everything = json.loads(json.dumps([rendered.root, *rendered.dependents]))
    for item in everything:
        if "agent.py" in item.get("data", {}):
            item["data"] |= {"agent": "sh", "agent.py": "python"}
    return list(everything)


@pytest.mark.parametrize("name", ["mpi", "tensorflow", "pytorch", "alone", "indexed"])
def test_objects_are_those_of_the_golden_file(name: str) -> None:
    """Test that objects are those of the golden file."""
    expected = list(yaml.safe_load_all((GOLDEN / f"{name}.yaml").read_text()))
    assert objects(rendered_all()[name]) == expected


def templates(rendered: Rendered) -> Iterator[Json]:
    """Yield the templates of the training's pods."""
    for job in rendered.role_jobs:
        yield job["spec"]["template"]


def expanded(text: str, variables: dict[str, str]) -> str:
    """Expand a text as the kubelet does."""
    parts, position = list[str](), 0
    while position < len(text):
        if text[position] == "$" and text[position + 1 : position + 2] == "$":
            parts.append("$")
            position += 2
        elif text[position : position + 2] == "$(" and ")" in text[position:]:
            end = text.index(")", position)
            name = text[position + 2 : end]
            parts.append(variables.get(name, text[position : end + 1]))
            position = end + 1
        else:
            parts.append(text[position])
            position += 1
    return "".join(parts)


texts = st.text(
    st.characters(codec="utf-8", exclude_characters="\0", exclude_categories=["Cs"]), max_size=20
)
dollars = st.text("$()aA", max_size=12)
requests: st.SearchStrategy[Json] = st.one_of(
    st.just({}),
    st.integers(1, 8).map(lambda cards: {"gpus": cards}),
    st.tuples(st.integers(1, 40), st.integers(1, 4)).map(
        lambda size: {"gpu_mem": str(size[0]), "cards": size[1]}
    ),
    st.integers(1, 20).map(lambda steps: {"gpu_mem": "4", "gpu_core": steps * 5}),
)


@st.composite
def trainings(draw: st.DrawFn) -> TrainingSpec:
    """Return any valid training."""
    kind = draw(st.sampled_from(["mpi", "tensorflow", "pytorch"]))
    claims = draw(st.lists(st.sampled_from(["a:/a", "b:/b", "a:/c"]), unique=True))
    more: Json = {}
    if kind == "tensorflow":
        more = {
            "ps": TensorFlowRole(replicas=draw(st.integers(0, 3)), **draw(requests)),
            "chief": TensorFlowRole(
                replicas=draw(st.integers(0, 1)), image=draw(st.sampled_from(["", "c"]))
            ),
            "evaluator": TensorFlowRole(replicas=draw(st.integers(0, 1))),
            "worker": RoleSpec(cpu=draw(st.sampled_from(["", "2"]))),
            "success_policy": draw(st.sampled_from(["ChiefWorker", "AllWorkers"])),
        }
    spec = TrainingSpec(
        kind=kind,  # type: ignore[arg-type]
        name=draw(st.from_regex(r"[a-z]([a-z0-9-]{0,41}[a-z0-9])?", fullmatch=True)),
        image="image",
        command=draw(st.lists(texts | dollars, min_size=1, max_size=3)),
        workers=draw(st.integers(1, 5)),
        env=draw(
            st.dictionaries(st.sampled_from(["A", "GIT_SYNC_BRANCH", "RANK"]), texts | dollars)
            # git would read it as an option.
            .filter(lambda env: not env.get("GIT_SYNC_BRANCH", "").startswith("-"))
        ),
        data=claims,
        tensorboard=bool(claims) and draw(st.booleans()),
        logdir=f"/{claims[0].partition('/')[2]}/x" if claims else "/x",
        gang=draw(st.booleans()),
        retry=draw(st.integers(0, 3)),
        grace_s=draw(st.integers(0, 100)),
        time_limit_s=draw(st.none() | st.floats(0.1, 1e6)),
        running_timeout_s=draw(st.none() | st.floats(0.1, 1e6)),
        ttl_after_finished_s=draw(st.none() | st.floats(0, 1e6)),
        sync_mode=(sync := draw(st.sampled_from(["", "git"]))),
        sync_source="https://example.com/a.git" if sync else "",
        **draw(requests),
        **more,
    )
    spec.validate()
    return spec


@settings(max_examples=60, deadline=None)
@given(trainings())
def test_every_object_can_be_created_and_is_found_by_its_labels(spec: TrainingSpec) -> None:
    """Test that every object can be created and is found by its labels."""
    rendered = render(spec, Contents(key="00"))
    own = {"fenka.io/job": spec.name, "fenka.io/kind": spec.kind}
    names = [(item["kind"], item["metadata"]["name"]) for item in objects(rendered)]
    assert len(set(names)) == len(names)
    for item in objects(rendered):
        assert LABEL.fullmatch(item["metadata"]["name"])
        assert own.items() <= item["metadata"]["labels"].items()
    for job in rendered.role_jobs:
        template = job["spec"]["template"]
        assert (own | {"release": spec.name}).items() <= template["metadata"]["labels"].items()
        last = f"{job['metadata']['name']}-{job['spec']['completions'] - 1}-abcde"
        assert LABEL.fullmatch(last)
        for value in template["metadata"]["labels"].values():
            assert len(value) <= 63


@settings(max_examples=60, deadline=None)
@given(trainings())
def test_commands_and_variables_mean_what_was_written(spec: TrainingSpec) -> None:
    """The kubelet resolves fenka's own references, and leaves everything that users write as it is."""
    for template in templates(render(spec, Contents(key="00"))):
        (container,) = template["spec"]["containers"]
        variables: dict[str, str] = {}
        for variable in container["env"]:
            assert variable["name"] not in variables
            if "value" in variable:
                value = expanded(variable["value"], variables)
                own = spec.env.get(variable["name"])
                assert own is None or value == own
                if own is None:
                    assert not REFERENCE.search(value)
                variables[variable["name"]] = value
            else:
                variables[variable["name"]] = "0"
        words = [expanded(word, variables) for word in container["command"]]
        if "serve" not in words[-1:]:
            assert words[-len(spec.argv) :] == spec.argv


@settings(max_examples=40, deadline=None)
@given(trainings())
def test_annotation_is_the_spec_as_submitted(spec: TrainingSpec) -> None:
    """Test that annotation is the spec as submitted."""
    text = render(spec, Contents()).root["metadata"]["annotations"]["fenka.io/spec"]
    assert msgspec.json.decode(text, type=TrainingSpec) == spec
    assert json.loads(text)["kind"] == spec.kind


@settings(max_examples=40, deadline=None)
@given(trainings())
def test_gang_has_all_pods_that_start_together(spec: TrainingSpec) -> None:
    """Test that gang has all pods that start together."""
    rendered = render(spec, Contents())
    counts = dict[str, int]()
    sizes = set[str]()
    for job in rendered.role_jobs:
        labels = job["spec"]["template"]["metadata"]["labels"]
        gang = labels.get("pod-group.scheduling.sigs.k8s.io/name")
        if gang:
            counts[gang] = counts.get(gang, 0) + job["spec"]["completions"]
            sizes.add(labels["pod-group.scheduling.sigs.k8s.io/min-available"])
            assert labels["fenka.io/role"] != "launcher"
    if counts:
        assert counts == {f"{TRAINERS[spec.kind]}-{spec.name}": int(next(iter(sizes)))}
        assert spec.gang
        assert len(sizes) == 1


def test_password_is_in_a_secret_only() -> None:
    """Test that password is in a secret only."""
    spec = msgspec.structs.replace(MPI, env={"GIT_SYNC_PASSWORD": "hunter2", "A": "b"})
    credentials = {"GIT_SYNC_USERNAME": "alice", "GIT_SYNC_PASSWORD": "hunter2"}
    rendered = render(spec, Contents(key="00", credentials=credentials))
    secrets = [item for item in rendered.dependents if item["kind"] == "Secret"]
    others = [item for item in objects(rendered) if item["kind"] != "Secret"]
    assert "hunter2" not in json.dumps(others)
    assert {item["metadata"]["name"] for item in secrets} == {"mpi-dist-mpi", "mpi-dist-git"}


@pytest.mark.parametrize(
    ("spec", "fields", "sentence"),
    [
        (ALONE, {"image": ""}, "--image is required on Kubernetes"),
        (ALONE, {"gpu_core": 101}, "--gpu-core must be from 0 to 100, got 101"),
        (
            ALONE,
            {"cards": 2},
            "a share of each of 2 cards is requested by HAMi's names, and this cluster's scheduler does not "
            "report that it reads them (hamiNames=true): leave out --gpu-core or --cards",
        ),
        (
            ALONE,
            {"gpu_mem": "4000MiB", "gpu_core": 0},
            "the exact size 4000MiB is requested by HAMi's names, and this cluster's scheduler does not "
            "report that it reads them (hamiNames=true): write --gpu-mem 4",
        ),
        (
            ALONE,
            {"gpu_mem": "4000MiB"},
            "the exact size 4000MiB is requested by HAMi's names, and this cluster's scheduler does not "
            "report that it reads them (hamiNames=true): use a multiple of 256MiB",
        ),
        (
            ALONE,
            {"gpu_core": 100, "cards": 2},
            "--gpu-core 100 with a share of each of 2 cards must be below 100 on Kubernetes",
        ),
        (
            TENSORFLOW,
            {"workers": 4096},
            "the variable TF_CONFIG would have more than 128 KiB, with which no process can start: use fewer "
            "workers, or a file",
        ),
        (
            PYTORCH,
            {"gpu_mem": "1000MiB"},
            "the exact size 1000MiB is requested by HAMi's names, and this cluster's scheduler does not "
            "report that it reads them (hamiNames=true): use a multiple of 256MiB",
        ),
        (
            PYTORCH,
            {"toleration": ["a=b:Never"]},
            "invalid --toleration 'a=b:Never': expected all, KEY or K=V:EFFECT, for example "
            "team=vision:NoSchedule",
        ),
    ],
)
def test_training_is_rejected_in_one_sentence_when_pods_cannot_request_it(
    spec: TrainingSpec, fields: Json, sentence: str
) -> None:
    """Test that training is rejected in one sentence when pods cannot request it."""
    with pytest.raises(InvalidRequest) as raised:
        render(msgspec.structs.replace(spec, **fields), Contents(), hami=False)
    assert str(raised.value) == sentence


@pytest.mark.parametrize(
    ("spec", "sentence"),
    [
        (
            MPI,
            "this job has several roles and requires JobSet, which this cluster does not have: install it "
            "by helm upgrade fenka fenka-VERSION.tgz (the chart of a release) -n fenka-system "
            "--reuse-values --set jobset.enabled=true",
        ),
        (TENSORFLOW, "this job has several roles and requires JobSet"),
        (PYTORCH, "--retry for several workers requires JobSet"),
        (
            msgspec.structs.replace(PYTORCH, retry=0),
            "--backfill for several workers requires JobSet",
        ),
        (
            msgspec.structs.replace(PYTORCH, retry=0, backfill=False),
            "--interruptible for several workers requires JobSet",
        ),
    ],
)
def test_training_is_rejected_when_it_requires_jobset(spec: TrainingSpec, sentence: str) -> None:
    """Test that training is rejected when it requires jobset."""
    with pytest.raises(InvalidRequest, match=f"^{re.escape(sentence)}"):
        render(spec, CONTENTS, jobset=False)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("all", {"operator": "Exists"}),
        ("gpu", {"key": "gpu", "operator": "Exists"}),
        ("a=b", {"key": "a", "operator": "Equal", "value": "b"}),
        (
            "a=b:NoSchedule,Equal",
            {"key": "a", "operator": "Equal", "value": "b", "effect": "NoSchedule"},
        ),
        ("a=b:NoExecute,Exists", {"key": "a", "operator": "Exists", "effect": "NoExecute"}),
        ("a:NoSchedule", {"key": "a", "operator": "Exists", "effect": "NoSchedule"}),
    ],
)
def test_toleration_has_arenas_forms(text: str, expected: Json) -> None:
    """Test that toleration has arenas forms."""
    rendered = render(msgspec.structs.replace(ALONE, toleration=[text]), Contents())
    (template,) = templates(rendered)
    assert template["spec"]["tolerations"] == [expected]


def test_first_worker_decides_when_there_is_no_chief() -> None:
    """Test that first worker decides when there is no chief."""
    spec = TrainingSpec(kind="tensorflow", name="a", image="i", command=["a"], workers=3)
    (job,) = render(spec, Contents()).role_jobs
    assert job["spec"]["successPolicy"] == {"rules": [{"succeededIndexes": "0"}]}
    every = msgspec.structs.replace(spec, success_policy="AllWorkers")
    (job,) = render(every, Contents()).role_jobs
    assert "successPolicy" not in job["spec"]
