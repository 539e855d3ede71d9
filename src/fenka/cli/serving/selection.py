"""Selects the machine or cluster, and the version of a service, that a command is about."""

from fenka.cli.errors import UserError
from fenka.cli.serving.backend import ServiceBackend
from fenka.cli.training.backend import JobTarget
from fenka.cli.training.selection import runs_here
from fenka.views.services import ServiceVersion


def open_services(target: JobTarget, *, all_namespaces: bool = False) -> ServiceBackend:
    """Return the services that a command is about. Raises UserError."""
    if runs_here(target, target.namespace):
        from fenka.cli.serving.local_backend import LocalServices

        return LocalServices()
    from fenka.cli import cluster
    from fenka.cli.serving.cluster_backend import ClusterServices

    namespace = target.namespace or cluster.namespace(target)
    return ClusterServices(target, namespace, all_namespaces=all_namespaces)


def find_versions(backend: ServiceBackend, name: str, version: str) -> list[ServiceVersion]:
    """Return the versions of a service, or the one that is named. Raises UserError."""
    versions = backend.versions(name)
    if not versions:
        raise UserError(f"service {name} not found in namespace {backend.namespace}")
    chosen = [each for each in versions if version in ("", each.version)]
    if not chosen:
        names = ", ".join(each.version for each in versions)
        raise UserError(f"service {name} has no version {version}: existing versions are {names}")
    return chosen


def find_version(backend: ServiceBackend, name: str, version: str) -> ServiceVersion:
    """Return a version of a service: the only one if none is named. Raises UserError."""
    first, *others = find_versions(backend, name, version)
    if others:
        names = ", ".join(each.version for each in (first, *others))
        raise UserError(f"service {name} has several versions: choose {names} by --version")
    return first
