"""Completes what users submit by what the administrator publishes, and what the namespace enforces."""

import asyncio
from collections.abc import Mapping
from typing import TypeVar

import msgspec
from msgspec import UNSET, UnsetType

from fenka.jobs.cluster_checks import SubmissionRefused, pod_security
from fenka.jobs.manifests.security import secured
from fenka.jobs.workload import PodOptions, PullPolicy, SecurityLevel
from fenka.kubernetes.client import Api
from fenka.kubernetes.service_reader import read_published

S = TypeVar("S", bound=PodOptions)

DEFAULTS = "defaults"
"""Key of the chart's ConfigMap for users: a JSON object of the fields of ClusterDefaults."""


class ClusterDefaults(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="kebab"):
    """Values of options of submit, serve and notebook where none is given; they mean the same."""

    scheduler: str | UnsetType = UNSET
    toleration: list[str] | UnsetType = UNSET
    selector: dict[str, str] | UnsetType = UNSET
    annotation: dict[str, str] | UnsetType = UNSET
    label: dict[str, str] | UnsetType = UNSET
    priority: str | UnsetType = UNSET
    image_pull_secret: list[str] | UnsetType = UNSET
    image_pull_policy: PullPolicy | UnsetType = UNSET
    security: SecurityLevel | UnsetType = UNSET
    run_as: str | UnsetType = UNSET


async def completed(api: Api, namespace: str, spec: S) -> tuple[S, Mapping[str, str]]:
    """Return a job as it is on this cluster, and all that the chart publishes for users.

    Raises SubmissionRefused, InvalidRequest, ApiError, ApiUnreachable.
    """
    published, enforced = await asyncio.gather(read_published(api), pod_security(api, namespace))
    known = with_defaults(spec, published.get(DEFAULTS, "{}"))
    known.validate_pods()
    return secured(known, enforced), published


def with_defaults(spec: S, text: str) -> S:
    """Return a job with the published values of options that were not given. Raises SubmissionRefused."""
    try:
        defaults = msgspec.json.decode(text, type=ClusterDefaults)
    except (msgspec.MsgspecError, RecursionError) as why:
        raise SubmissionRefused(
            f"the key {DEFAULTS} of ConfigMap kube-public/fenka is invalid ({why}): ask the cluster's "
            "administrator to correct users.defaults of fenka's chart"
        ) from None
    bare = type(spec)()
    values = {
        field: value
        for field in defaults.__struct_fields__
        if (value := getattr(defaults, field)) is not UNSET
        and getattr(spec, field) == getattr(bare, field)
    }
    return msgspec.structs.replace(spec, **values)
