"""Values of training jobs: names of instances, sums of cards, durations."""

import pytest

from fenka.views.workloads import JobProcess, Trainer, TrainingJob, chief_role, instance_name


def instance(
    name: str, requested: float | None = 0, *, allocated: float = 0, chief: bool = False
) -> JobProcess:
    """Return a running worker."""
    return JobProcess(
        name,
        f"{name}-x",
        "worker",
        0,
        chief,
        "Running",
        "Running",
        0,
        requested=requested,
        allocated=allocated,
    )


def job(*instances: JobProcess, ended: float | None = None) -> TrainingJob:
    """Return a job that was submitted at 100."""
    return TrainingJob("j", "default", "u", "RUNNING", "mpijob", 100, ended, instances)


def test_job_adds_up_its_instances_when_cards_are_shared() -> None:
    """0.3 + 0.3 + 0.3 is 0.9, not 0.8999999999999999; the launcher requests none."""
    workers = [instance(f"w{index}", 0.3, allocated=0.3) for index in range(3)]
    assert (job(*workers, instance("l")).requested, job(*workers).allocated) == (0.9, 0.9)


def test_job_requests_an_unknown_number_when_a_card_has_no_size() -> None:
    """A sum that leaves out an instance would be wrong."""
    assert job(instance("a", 1), instance("b", None)).requested is None


def test_duration_ends_with_the_job_while_age_goes_on() -> None:
    """As in the articles' picture: duration 12m, age 13m."""
    ended = job(ended=100 + 12 * 60)
    assert (ended.duration(100 + 13 * 60), ended.age(100 + 13 * 60)) == (12 * 60, 13 * 60)
    assert job().duration(130) == 30


def test_instance_is_found_by_its_name_and_by_its_pods() -> None:
    """`-i` takes either."""
    first, chief = instance("a"), instance("b", chief=True)
    both = job(first, chief)
    assert (both.instance("a"), both.instance("b-x"), both.instance("c")) == (first, chief, None)
    assert (both.chief, job(first).chief) == (chief, None)


@pytest.mark.parametrize(
    ("trainer", "role", "index", "name"),
    [
        ("mpijob", "launcher", 0, "j-launcher-0"),
        ("mpijob", "worker", 1, "j-worker-1"),
        ("pytorchjob", "worker", 0, "j-master-0"),
        ("pytorchjob", "worker", 2, "j-worker-1"),
        ("tfjob", "worker", 0, "j-worker-0"),
        ("tfjob", "ps", 0, "j-ps-0"),
    ],
)
def test_instance_name_is_arenas(trainer: Trainer, role: str, index: int, name: str) -> None:
    """PyTorch's first member is the master, and the others count from 0."""
    assert instance_name("j", trainer, role, index) == name


@pytest.mark.parametrize(
    ("roles", "chief"),
    [
        (("worker", "launcher"), "launcher"),
        (("ps", "worker", "chief", "evaluator"), "chief"),
        (("ps", "worker"), "worker"),
        ((), ""),
    ],
)
def test_chief_role_follows_the_framework(roles: tuple[str, ...], chief: str) -> None:
    """The launcher; TensorFlow's chief or else its first worker."""
    assert chief_role(roles) == chief
