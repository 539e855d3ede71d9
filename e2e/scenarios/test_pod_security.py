"""Run trainings and services in a namespace that enforces the Pod Security Standard `restricted`."""

import pytest

from e2e.cluster import wait_until
from e2e.images import TRAINING
from e2e.scenarios.installation import FENKA, WORKLOAD, Installation

ENFORCE = "pod-security.kubernetes.io/enforce"


@pytest.fixture
def restricted(shared: Installation, namespace: str) -> str:
    """Provide a namespace that enforces the standard."""
    shared.cluster.kubectl("label", "namespace", namespace, f"{ENFORCE}=restricted")
    return namespace


@pytest.mark.full
def test_training_and_service_run_when_their_namespace_is_restricted(
    shared: Installation, restricted: str
) -> None:
    """A service on a full card is updated, and the update is undone. What is refused is said at once."""
    cluster = shared.cluster

    def fenka(verbs: str, *words: str) -> str:
        return cluster.run(*FENKA, *verbs.split(), "-n", restricted, *words)

    user = ("--run-as=1000", "--image-pull-policy=Never")
    fenka("submit pytorch", "--name=train", f"--image={TRAINING}", "--gpu-mem=2", *user, "--", "id")
    wait_until("the training has ended", lambda: "SUCCEEDED" in fenka("get train"), 120)
    assert "uid=1000" in fenka("logs train")

    serve = ("--name=bert", "--version=v1", f"--image={WORKLOAD}", "--gpu-mem=10", *user)
    program = ("--", "python3", "-m", "http.server", "5000")
    selector = f"--selector=kubernetes.io/hostname={cluster.nodes[0].name}"
    fenka(
        "serve custom", *serve, selector, "--restful-port=5000", "--wait", "--timeout=120", *program
    )
    done = fenka("serve update custom", "--name=bert", "--env=A=1", "--wait", "--timeout=120")
    assert "updated" in done
    deployment = cluster.get("deployment", "bert-v1", restricted)
    assert deployment["spec"]["strategy"]["rollingUpdate"]["maxSurge"] == 0
    fenka("serve undo bert", "--wait", "--timeout=120")
    pod = cluster.get("deployment", "bert-v1", restricted)["spec"]["template"]["spec"]
    assert "A" not in [variable["name"] for variable in pod["containers"][0]["env"]]

    command = ("--name=free", f"--image={TRAINING}", "--gpu-mem=2", "--security=none", "--", "id")
    words = (*FENKA, "submit", "pytorch", "-n", restricted, *command)
    done = cluster.run("sh", "-c", '"$@" 2>&1', "sh", *words)
    assert "Warning: would violate PodSecurity" in done
