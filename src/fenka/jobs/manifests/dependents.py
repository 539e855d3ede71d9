"""Objects that the root owns: files, secrets, Services, TensorBoard."""

from fenka.cluster import training_objects
from fenka.jobs.manifests import mpi, names
from fenka.jobs.manifests.names import Manifest
from fenka.jobs.manifests.pods import Rendering
from fenka.jobs.manifests.security import pod_security, tool_security
from fenka.jobs.manifests.volumes import as_manifests, binary_files, claim_volumes, config_files
from fenka.jobs.manifests.workload import toleration, without_empty
from fenka.jobs.training import TrainingSpec

TENSORBOARD_IMAGE = "tensorflow/tensorflow:2.16.1"
"""Used without `--tensorboard-image`."""
TENSORBOARD_PORT = 6006


def dependents(rendering: Rendering) -> list[Manifest]:
    """Return all objects that the root owns. Raises InvalidRequest."""
    spec, contents = rendering.spec, rendering.contents
    objects = list[Manifest]()
    if spec.kind == "mpi":
        hosts = [rendering.host("worker", index) for index in range(spec.workers)]
        objects += mpi.dependents(spec, contents, hosts)
    if contents.code:
        archive = {"code.tar.gz": contents.code}
        objects.append(binary_files(names.object_name(spec, "code"), names.labels(spec), archive))
    objects += config_files(names.object_name(spec, "config"), names.labels(spec), contents)
    if contents.credentials:
        data = mpi.encoded(dict(contents.credentials))
        name = names.object_name(spec, "git")
        objects.append(
            names.manifest("Secret", "v1", name, names.labels(spec), type="Opaque", data=data)
        )
    if rendering.engine == "indexed-job":
        objects.append(_headless_service(spec))
    if spec.tensorboard:
        objects += _tensorboard(spec)
    return objects


def _headless_service(spec: TrainingSpec) -> Manifest:
    """Return the Service that gives the pods names; a JobSet makes its own."""
    fields = {
        "clusterIP": "None",
        "publishNotReadyAddresses": True,
        "selector": {training_objects.JOB: spec.name, training_objects.ROLE: "worker"},
    }
    return names.manifest("Service", "v1", spec.name, names.labels(spec), spec=fields)


def _tensorboard(spec: TrainingSpec) -> list[Manifest]:
    """Return TensorBoard and its Service."""
    name, labels = names.object_name(spec, "tensorboard"), names.labels(spec, "tensorboard")
    volumes = claim_volumes(spec)
    container = {
        "name": "tensorboard",
        "image": spec.tensorboard_image or TENSORBOARD_IMAGE,
        "imagePullPolicy": spec.image_pull_policy,
        "command": [
            "tensorboard",
            f"--logdir={spec.logdir}",
            f"--port={TENSORBOARD_PORT}",
            # TensorBoard has no login: it listens where its Service reaches it, and nowhere else.
            "--host=$(POD_IP)",
        ],
        "env": [{"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}],
        "ports": [{"name": "http", "containerPort": TENSORBOARD_PORT}],
        "readinessProbe": {"tcpSocket": {"port": TENSORBOARD_PORT}},
        "volumeMounts": [volume.mount for volume in volumes],
        "securityContext": tool_security(spec),
    }
    pod: Manifest = {
        "enableServiceLinks": False,
        "securityContext": pod_security(spec),
        "containers": [without_empty(container)],
        "volumes": as_manifests(volumes),
    }
    pod = without_empty(pod)
    if spec.toleration:
        pod["tolerations"] = [toleration(text) for text in spec.toleration]
    if spec.image_pull_secret:
        pod["imagePullSecrets"] = [{"name": secret} for secret in spec.image_pull_secret]
    deployment = {
        "replicas": 1,
        "selector": {"matchLabels": labels},
        "template": {"metadata": {"labels": labels}, "spec": pod},
    }
    ports = [{"name": "http", "port": TENSORBOARD_PORT, "targetPort": "http"}]
    service = {"type": "NodePort", "selector": labels, "ports": ports}
    return [
        names.manifest("Deployment", "apps/v1", name, labels, spec=deployment),
        names.manifest("Service", "v1", name, labels, spec=service),
    ]
