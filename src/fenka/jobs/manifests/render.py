"""Renders a training: its root object and the objects that the root owns."""

from dataclasses import dataclass

from fenka.jobs.manifests.contents import Contents
from fenka.jobs.manifests.dependents import dependents
from fenka.jobs.manifests.names import Manifest
from fenka.jobs.manifests.pods import Rendering
from fenka.jobs.manifests.roots import engine, role_jobs, root
from fenka.jobs.training import TrainingSpec


@dataclass(frozen=True, slots=True)
class Rendered:
    """The objects of a training.

    Attributes:
        root: The Job or JobSet; it is not suspended.
        dependents: What it owns; without owner references, which name the root's UID.
        role_jobs: The Jobs that the root becomes.
    """

    root: Manifest
    dependents: list[Manifest]
    role_jobs: list[Manifest]


def render(
    spec: TrainingSpec, contents: Contents, *, jobset: bool = True, hami: bool = True
) -> Rendered:
    """Return the objects of a valid training.

    Args:
        spec: The training.
        contents: Its files and secrets.
        jobset: The cluster has JobSet.
        hami: The cluster reads HAMi's names.

    Raises:
        InvalidRequest, InvalidSize: It cannot run on this cluster.
    """
    spec.validate_tensorboard()
    rendering = Rendering(spec, contents, engine(spec, jobset=jobset), hami)
    return Rendered(root(rendering), dependents(rendering), role_jobs(rendering))
