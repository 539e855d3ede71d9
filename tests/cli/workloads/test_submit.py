"""Test `fenka submit`: arena's spellings, files, sentences, what is printed and created."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from aiohttp import web

from tests.cli.command import fenka
from tests.cli.workloads.conftest import Run
from tests.fakes.api_server import FakeApiServer

pytestmark = pytest.mark.process  # keys by ssh-keygen, code by git

IMAGE = "--image=uber/horovod:0.13.11"
ARTICLE = [
    "--name=mpi-dist",
    "--gpus=1",
    "--workers=2",
    IMAGE,
    "--env=GIT_SYNC_BRANCH=cnn_tf_v1.9_compatible",
    "--syncMode=git",
    "--syncSource=file:///nonexistent/benchmarks.git",
    "mpirun python code/benchmarks/train.py --model resnet101",
]


def dry(*words: str) -> list[dict[str, Any]]:
    """Return the objects that a dry run prints."""
    kind, *rest = words
    done = fenka("submit", kind, "--dry-run", *rest)
    assert done.exit_code == 0, done.stderr
    return list(yaml.safe_load_all(done.stdout))


def spec_of(*words: str) -> dict[str, Any]:
    """Return the spec of the annotation that a dry run prints."""
    root = dry(*words)[0]
    return dict(json.loads(root["metadata"]["annotations"]["fenka.io/spec"]))


@pytest.mark.parametrize("kind", ["mpi", "mj", "mpijob"])
def test_article_submission_prints_a_jobset_and_what_it_owns(kind: str) -> None:
    """Test that article submission prints a jobset and what it owns."""
    root, files, secret = dry(kind, *ARTICLE)
    assert (root["kind"], root["metadata"]["name"]) == ("JobSet", "mpi-dist")
    assert (files["kind"], secret["kind"]) == ("ConfigMap", "Secret")
    assert "suspend" not in root["spec"]
    assert root["metadata"]["namespace"] == "default"
    assert files["data"]["agent"].startswith("#!/bin/sh\n")


def test_old_spellings_work_and_are_named() -> None:
    """Test that old spellings work and are named."""
    done = fenka("submit", "mpi", "--dry-run", *ARTICLE)
    assert done.stderr == (
        "Flag --syncMode has been deprecated, please use --sync-mode instead\n"
        "Flag --syncSource has been deprecated, please use --sync-source instead\n"
    )


def test_output_is_a_list_when_json_is_requested() -> None:
    """Test that output is a list when json is requested."""
    done = fenka("submit", "py", "--name=a", "--image=i", "--dry-run", "-o", "json", "train.py")
    assert [item["kind"] for item in json.loads(done.stdout)["items"]] == ["Job"]


@pytest.mark.parametrize(
    ("words", "fields"),
    [
        (["-e", "A=1", "--env=B=x=y"], {"env": {"A": "1", "B": "x=y"}}),
        (["-d", "a:/a", "--data", "b:/b"], {"data": ["a:/a", "b:/b"]}),
        (["-p", "high"], {"priority": "high"}),
        (["--gpu-mem=4", "--gpu-core=50%"], {"gpu-mem": "4", "gpu-core": 50}),
        (["-l", "a=b", "-a", "c=d"], {"label": {"a": "b"}, "annotation": {"c": "d"}}),
        (["--time-limit", "2h30m"], {"time-limit": 9000.0}),
        (["--for=90"], {"time-limit": 90.0}),
        (["--running-timeout=1d", "--grace=2m"], {"running-timeout": 86400.0, "grace": 120.0}),
        (["--gpumemory=4", "--gpucore=30"], {"gpu-mem": "4", "gpu-core": 30}),
        (["--gang=false"], {"gang": False}),
        (["--no-gang"], {"gang": False}),
        (["--gang=true"], {}),
        (["--tensorboard=false"], {}),
        (["--selector", "zone=a", "--device", "rdma/hca=1"], {"selector": {"zone": "a"}}),
        (
            ["--toleration=all", "--toleration", "a=b:NoSchedule"],
            {"toleration": ["all", "a=b:NoSchedule"]},
        ),
        (["--workingDir=/work", "--dataDir=/mnt"], {"working-dir": "/work", "data-dir": ["/mnt"]}),
        (["--retry", "3"], {"retry": 3}),
        (["--interruptible"], {"interruptible": True}),
    ],
)
def test_options_are_the_fields_of_the_spec(words: list[str], fields: dict[str, Any]) -> None:
    """Test that options are the fields of the spec."""
    spec = spec_of("pytorch", "--name=a", "--image=i", *words, "train")
    common = {"kind": "pytorch", "name": "a", "image": "i", "command": ["train"]}
    shown = {name: value for name, value in spec.items() if name not in common}
    assert fields.items() <= shown.items()
    assert shown.keys() - fields.keys() <= {"device"}


def test_roles_of_tensorflow_have_options_of_their_own() -> None:
    """Test that roles of tensorflow have options of their own."""
    spec = spec_of(
        *("tf", "--name=a", "--image=i", "--workers=2", "--ps=1", "--psCpu=2", "--ps-port=3333"),
        *(
            "--chief",
            "--chief-cpu=1",
            "--evaluator=true",
            "--workerImage=w",
            "--worker-port",
            "4444",
        ),
        *("python", "x.py"),
    )
    assert spec["ps"] == {"replicas": 1, "cpu": "2", "port": 3333}
    assert spec["chief"] == {"replicas": 1, "cpu": "1"}
    assert spec["evaluator"] == {"replicas": 1}
    assert spec["worker"] == {"image": "w"}
    assert spec["worker-port"] == 4444
    assert spec["command"] == ["python", "x.py"]


@pytest.mark.parametrize(
    ("words", "command"),
    [
        (["python train.py --gpus=8"], ["python train.py --gpus=8"]),
        (
            ["python", "train.py", "--name=b", "-e", "--"],
            ["python", "train.py", "--name=b", "-e", "--"],
        ),
        (["--", "--program", "--name=b"], ["--program", "--name=b"]),
        (["--", "python -c \"print('loss: 1')\" # x"], ["python -c \"print('loss: 1')\" # x"]),
    ],
)
def test_words_after_the_options_are_the_command(words: list[str], command: list[str]) -> None:
    """Test that words after the options are the command."""
    assert spec_of("py", "--name=a", "--image=i", *words)["command"] == command


def test_options_prevail_over_the_file(tmp_path: Path) -> None:
    """Test that options prevail over the file."""
    file = tmp_path / "job.yaml"
    file.write_text(
        "name: a\nimage: i\nworkers: 2\nretry: 1\nenv: {A: 1, B: yes}\ncommand: train\n"
        "time-limit: 2h\nps: {replicas: 1, cpu: 2}\ntoleration: gpu\n"
    )
    spec = spec_of("tf", "-f", str(file), "--workers=3", "-e", "A=2")
    assert spec == {
        "kind": "tensorflow",
        "name": "a",
        "image": "i",
        "workers": 3,
        "retry": 1,
        "env": {"A": "2", "B": "yes"},
        "command": ["train"],
        "time-limit": 7200,
        "ps": {"replicas": 1, "cpu": "2"},
        "toleration": ["gpu"],
    }


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("wrokers: 2", "wrokers is not known: did you mean workers?"),
        ("ps: {x: 1}", "ps.x is not known: remove it"),
        ("workers: many", "invalid --workers 'many': expected a whole number"),
        ("gang: perhaps", "invalid --gang 'perhaps': expected true or false"),
        ("[]", "FILE must be a mapping of fields, as in `name: mpi-dist`"),
        ("kind: mpi", "FILE describes a training of kind mpi, not tensorflow"),
        ("a: [", "FILE is no YAML: line 1, column 5: "),
        ("a: &b [1]", "FILE has an anchor or alias in line 1: write the value itself"),
        ("a: " + 30 * "[", "FILE is nested deeper than 20 levels in line 1: flatten it"),
        ("#" * 262145, "FILE has more than 262144 bytes: leave out what is not needed"),
        (r'env: {A: "\0"}', r"'\x00' is no text in UTF-8: write it in UTF-8, without NUL"),
        ("time-limit: soon", "invalid time 'soon': expected for example 90s, 10m or 2h30m"),
    ],
)
def test_file_is_rejected_in_one_sentence(tmp_path: Path, text: str, sentence: str) -> None:
    """Test that file is rejected in one sentence."""
    file = tmp_path / "job.yaml"
    file.write_text(text)
    done = fenka("submit", "tf", "-f", str(file), "--dry-run", "train")
    assert done.exit_code == 2
    assert done.stderr.startswith(f"fenka: {sentence.replace('FILE', str(file))}")
    assert done.stderr.count("\n") == 1
    assert not done.stdout


@pytest.mark.parametrize("command", [("submit", "tf"), ("serve", "custom")])
def test_file_is_rejected_when_it_never_ends(command: tuple[str, str]) -> None:
    """Test that no more of it is read than a file may have."""
    done = fenka(*command, "-f", "/dev/zero", "--dry-run", "train")
    sentence = "fenka: /dev/zero has more than 262144 bytes: leave out what is not needed\n"
    assert (done.exit_code, done.stdout, done.stderr) == (2, "", sentence)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (
            ["--name=Mpi_Dist", "a"],
            "invalid job name 'Mpi_Dist': use lowercase letters, digits and '-', ",
        ),
        (["--name=a"], "no command given: write it after --"),
        (["--name=a", "b"], "--image is required on Kubernetes"),
        (
            ["--name=a", "--sync-mode=rsync", "b"],
            "sync mode 'rsync' is not supported: use --sync-mode git",
        ),
        (["--name=a", "--data=pvc", "b"], "invalid --data 'pvc': expected CLAIM:PATH"),
        (["--name=a", "--env=A", "b"], "invalid --env 'A': expected K=V"),
        (["--name=a", "--env=FENKA_INDEX=1", "b"], "invalid --env 'FENKA_INDEX': "),
        (["--name=a", "--workers=0", "b"], "--workers must be from 1 to 4096, got 0"),
        (["--name=a", "--workers=x", "b"], "invalid --workers 'x': expected a whole number"),
        (["--name=a", "--gpus=0.5", "b"], "--gpus: '0.5' is no number of whole cards: a part"),
        (["--name=a", "--gpu-core=101%", "b"], "invalid --gpu-core '101%': expected a whole"),
        (
            ["--name=a", "--cpu=lots", "b"],
            "invalid --cpu 'lots': expected an amount such as 2 or 500m",
        ),
        (
            ["--name=a", "--rdma", "b"],
            "--rdma is not supported: request the device by --device NAME=N",
        ),
        (
            ["--name=a", "--hostNetwork", "b"],
            "--host-network is not supported: pods have namespaces",
        ),
        (
            ["--name=a", "--model-name=m", "b"],
            "--model-name is not supported: there is no registry",
        ),
        (
            ["--name=a", "--role-sequence=a", "b"],
            "--role-sequence is not supported: all roles start",
        ),
        (
            ["--name=a", "--starting-timeout=1s", "b"],
            "--starting-timeout is not supported: use --time-limit",
        ),
        (
            ["--name=a", "--worker-affinity-policy=x", "b"],
            "--worker-affinity-policy is not supported: use",
        ),
        (["--name=a", "--queue=true", "b"], "--queue takes the name of a queue of Kueue, got true"),
        (["--name=a", "--gang=maybe", "b"], "invalid --gang 'maybe': expected true or false"),
        (
            ["--name=a", "--clean-task-policy=None", "b"],
            "invalid --clean-task-policy 'None': expected Running",
        ),
        (
            ["--name=a", "--ps=1", "b"],
            "--ps and its options are TensorFlow's: use fenka submit tensorflow",
        ),
        (["--name=a", "--code=nowhere", IMAGE, "b"], "--code nowhere is not a directory"),
        (
            ["--name=a", "--config-file=nowhere:/etc/x", IMAGE, "b"],
            "--config-file nowhere cannot be read: No such file or directory",
        ),
        (
            ["--name=a", "--tensorboard", "b"],
            "--tensorboard requires --logdir inside a --data mount: /training_logs is local to each pod",
        ),
        (["--name=a", "b\udcff"], r"'b\udcff' is no text in UTF-8: write it in UTF-8, without NUL"),
        (
            ["--name=a", "--backfill", "--priority=x", "b"],
            "--backfill sets the priority: leave out --priority",
        ),
    ],
)
def test_options_are_rejected_in_one_sentence(
    run: Run, server: FakeApiServer, words: list[str], sentence: str
) -> None:
    """And nothing is created."""
    done = run("submit", "mpi", *words)
    assert done.exit_code != 0
    assert done.stderr.startswith(f"fenka: {sentence}")
    assert done.stderr.count("\n") == 1
    assert not server.writes


@pytest.mark.parametrize(
    ("kind", "instead"),
    [
        ("horovod", "use fenka submit mpijob, with mpirun"),
        ("sparkjob", "use Spark's own spark-submit"),
        ("volcano", "use fenka submit pytorchjob; its processes start together"),
        ("ray", "use Ray's own ray job submit"),
        ("et", "use fenka submit pytorchjob, with torchrun"),
        ("deepspeed", "use fenka submit pytorchjob, with torchrun"),
    ],
)
def test_other_kinds_are_refused_with_the_alternative(kind: str, instead: str) -> None:
    """Test that other kinds are refused with the alternative."""
    done = fenka("submit", kind, "--name=a", "--gpus=1", "python x.py")
    assert (done.exit_code, done.stderr) == (
        2,
        f"fenka: submit {kind} is not supported: {instead}\n",
    )


def test_submission_is_confirmed_in_arenas_words(run: Run, server: FakeApiServer) -> None:
    """Test that submission is confirmed in arenas words."""
    server.discovered.add("/apis/jobset.x-k8s.io/v1alpha2")
    done = run("submit", "mpi", *ARTICLE)
    assert done.stdout == (
        "The Job mpi-dist has been submitted successfully\n"
        "You can run `fenka get mpi-dist` to check the job status\n"
    )
    assert server.get("jobsets", "mpi-dist", "default")["spec"]["suspend"] is False


def test_right_to_ask_for_is_named_when_it_is_missing(run: Run, server: FakeApiServer) -> None:
    """Test that right to ask for is named when it is missing."""
    server.discovered.add("/apis/jobset.x-k8s.io/v1alpha2")
    server.forbidden.add("jobsets")
    done = run("submit", "mpi", *ARTICLE[:4], "mpirun a")
    assert done.stderr == (
        "fenka: user alice may not create jobsets in namespace default: ask for the ClusterRole fenka-user\n"
    )
    assert not server.writes


def test_jobset_is_named_when_the_cluster_lacks_it(run: Run, server: FakeApiServer) -> None:
    """Test that jobset is named when the cluster lacks it."""
    done = run("submit", "mpi", *ARTICLE[:4], "mpirun a")
    assert done.stderr == (
        "fenka: this job has several roles and requires JobSet, which this cluster does not have: install it "
        "by helm upgrade fenka fenka-VERSION.tgz (the chart of a release) -n fenka-system "
        "--reuse-values --set jobset.enabled=true\n"
    )
    assert not server.writes


def ending(server: FakeApiServer, condition: str, exit_code: int) -> None:
    """Let the job run and end as soon as it is resumed."""

    async def end(request: web.Request) -> None:
        if request.method != "PATCH":
            return
        root = server.get("jobsets", "mpi-dist", "default")
        root["metadata"]["creationTimestamp"] = "2026-01-16T13:19:00Z"
        root["status"] = {"conditions": [{"type": condition, "status": "True"}]}
        labels = {"fenka.io/job": "mpi-dist", "fenka.io/role": "launcher"}
        metadata = {
            "name": "launcher-x",
            "namespace": "default",
            "labels": labels,
            "creationTimestamp": "2026-01-16T13:20:00Z",
        }
        state = {"terminated": {"exitCode": exit_code}}
        phase = "Failed" if exit_code else "Succeeded"
        status = {"phase": phase, "containerStatuses": [{"name": "mpi", "state": state}]}
        spec = {"containers": [{"name": "mpi"}]}
        server.put("pods", {"metadata": metadata, "spec": spec, "status": status})
        server.logs["launcher-x", "mpi"] = ["2026-01-16T13:20:01.5Z loss: 1"]

    server.after = end


@pytest.mark.parametrize(
    ("condition", "exit_code", "code"), [("Completed", 0, 0), ("Failed", 7, 7), ("Failed", 0, 1)]
)
def test_followed_job_prints_its_log_and_ends_with_its_code(
    run: Run, server: FakeApiServer, condition: str, exit_code: int, code: int
) -> None:
    """A job may fail while its chief has succeeded."""
    server.discovered.add("/apis/jobset.x-k8s.io/v1alpha2")
    ending(server, condition, exit_code)
    done = run("submit", "mpi", *ARTICLE[:4], "--follow", "mpirun a")
    assert done.stdout.splitlines()[2:] == ["loss: 1"]
    assert done.exit_code == code, done.stderr


@pytest.mark.parametrize(
    ("cause", "said"),
    [
        (
            'failed to call webhook: Post "https://jobset-webhook-service.jobset-system.svc:443/mutate?x=1": '
            "dial tcp 10.96.1.2:443: connect: connection refused",
            "(service jobset-webhook-service of namespace jobset-system) does not answer yet",
        ),
        ('no endpoints available for service "x"', "the webhook mjobset.kb.io does not answer yet"),
    ],
)
def test_webhook_is_named_when_it_is_not_up_yet(
    run: Run, server: FakeApiServer, cause: str, said: str
) -> None:
    """JobSet was installed some seconds ago."""
    server.discovered.add("/apis/jobset.x-k8s.io/v1alpha2")

    async def refuse(request: web.Request) -> web.Response | None:
        if request.method != "POST" or not request.path.endswith("/jobsets"):
            return None
        message = f'Internal error occurred: failed calling webhook "mjobset.kb.io": {cause}'
        status = {"message": message, "reason": "InternalError", "code": 500}
        return web.json_response(status, status=500)

    server.before = refuse
    done = run(
        "submit", "mpi", "--name=a", "--workers=2", "--gpus=1", IMAGE, "mpirun python train.py"
    )
    assert done.exit_code == 1
    assert said in done.stderr
    assert "then try again" in done.stderr
    assert done.stderr.count("\n") == 1
    assert server.all("jobsets") == []
