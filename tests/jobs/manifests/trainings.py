"""Trainings of each framework that the tests of manifests render."""

from fenka.jobs.collection import Contents
from fenka.jobs.manifests.training_manifest import Rendered, render
from fenka.jobs.training import TensorFlowRole, TrainingSpec
from fenka.jobs.workload import RoleSpec

KEY = "ab" * 32
COMMIT = "5ae49eb6c0f1a2b3c4d5e6f708192a3b4c5d6e7f"

MPI = TrainingSpec(
    kind="mpi",
    name="mpi-dist",
    image="uber/horovod:0.13.11",
    command=["mpirun python code/benchmarks/train.py $(date) $HOME"],
    workers=2,
    gpus=1,
    env={"GIT_SYNC_BRANCH": "cnn", "NOTE": "a: $(workers) # 'b'"},
    sync_mode="git",
    sync_source="https://example.com/benchmarks.git",
    sync_image="git:2",
)
TENSORFLOW = TrainingSpec(
    kind="tensorflow",
    name="tf-dist",
    image="tensorflow:2",
    command=["python", "train.py"],
    workers=2,
    gpu_mem="4",
    cards=2,
    cpu="2",
    memory="4Gi",
    data=["training-data:/data", "logs:/logs"],
    tensorboard=True,
    logdir="/logs/run",
    ps=TensorFlowRole(replicas=1, cpu="1"),
    chief=TensorFlowRole(replicas=1, gpu_mem="2"),
    evaluator=TensorFlowRole(replicas=1),
    worker=RoleSpec(selector={"zone": "a"}),
    toleration=["all"],
)
PYTORCH = TrainingSpec(
    kind="pytorch",
    name="torch-dist",
    image="pytorch:2",
    command=["torchrun train.py"],
    workers=3,
    gpu_mem="4",
    gpu_core=30,
    gpu_core_mode="soft",
    retry=2,
    time_limit_s=3600,
    running_timeout_s=7200,
    ttl_after_finished_s=60,
    grace_s=120,
    checkpoint="states",
    interruptible=True,
    backfill=True,
    data_dir=["/mnt/data:/data"],
    label={"team": "vision"},
    annotation={"note": "x"},
    image_pull_secret=["registry"],
    toleration=["gpu", "team=vision:NoSchedule"],
    device={"rdma/hca": "1"},
    scheduler="fenka",
)
ALONE = TrainingSpec(
    kind="pytorch",
    name="alone",
    image="pytorch:2",
    command=["python", "train.py", "$(date)"],
    gpu_mem="4",
    gpu_core=30,
    retry=3,
    code="src",
    config_file=["train.ini:/etc/train.ini"],
    priority="high",
)
INDEXED = TrainingSpec(
    kind="pytorch", name="equal", image="pytorch:2", command=["torchrun", "train.py"], workers=2
)
CONTENTS = Contents(
    key=KEY,
    revision=COMMIT,
    credentials={"GIT_SYNC_USERNAME": "alice", "GIT_SYNC_PASSWORD": "secret"},
)
FILES = Contents(code=b"archive", config_files={"/etc/train.ini": b"[train]\n"})


def rendered_all() -> dict[str, Rendered]:
    """Return the objects of all trainings, by the name of the golden file."""
    return {
        "mpi": render(MPI, CONTENTS),
        "tensorflow": render(TENSORFLOW, Contents()),
        "pytorch": render(PYTORCH, Contents()),
        "alone": render(ALONE, FILES),
        "indexed": render(INDEXED, Contents(), jobset=False),
    }
