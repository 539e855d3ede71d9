"""Renders what the pods of trainings and services have in common.

The kubelet expands `$(NAME)` in commands and variables. Users' words are escaped, so that they mean the same
as on a workstation.
"""

import re
from collections.abc import Mapping

from fenka.cluster.autoscaling import INTERRUPTIBLE
from fenka.core.request import InvalidRequest
from fenka.jobs.manifests.object_names import Manifest
from fenka.jobs.manifests.pod_security import pod_security
from fenka.jobs.workload import PodOptions, RoleSpec

MAX_TEXT_BYTES = 128 * 1024
"""Of a variable and of a word of a command: Linux's MAX_ARG_STRLEN."""

NO_CARDS = {"NVIDIA_VISIBLE_DEVICES": "void"}
"""Images of frameworks have `all`, and NVIDIA's runtime would give the container every card of its node."""

INTERRUPTIBLE_POD = {INTERRUPTIBLE: "true"}


def pod_settings(spec: PodOptions) -> Manifest:
    """Return fields of a pod's spec that kube-scheduler and the kubelet read. Raises InvalidRequest."""
    return {
        # A Service called REDIS would put REDIS_PORT into the environment.
        "enableServiceLinks": False,
        "securityContext": pod_security(spec),
        "schedulerName": spec.scheduler,
        "tolerations": [toleration(text) for text in spec.toleration],
        "imagePullSecrets": [{"name": name} for name in spec.image_pull_secret],
    }


def pod_annotations(spec: PodOptions) -> dict[str, str]:
    """Return the annotations of a pod, except for those about its cards."""
    return spec.annotation | (INTERRUPTIBLE_POD if spec.interruptible else {})


def limits(resources: RoleSpec, devices: Mapping[str, str]) -> dict[str, str]:
    """Return the limits of a container, except for its cards."""
    own = {"cpu": resources.cpu, "memory": resources.memory}
    return {name: amount for name, amount in own.items() if amount} | dict(devices)


def variables(given: Mapping[str, str], own: Mapping[str, str]) -> list[Manifest]:
    """Return the variables of a container.

    Args:
        given: fenka's, which may refer to others.
        own: The user's, which prevail.

    Raises:
        InvalidRequest: No process can start with one of them.
    """
    values = {**given, **{name: escape(value) for name, value in own.items()}}
    for name, value in values.items():
        if len(name) + len(value.encode()) + 2 > MAX_TEXT_BYTES:
            raise InvalidRequest(
                f"the variable {name} would have more than {MAX_TEXT_BYTES >> 10} KiB, with which no process "
                "can start: use fewer workers, or a file"
            )
    return [{"name": name, "value": value} for name, value in values.items()]


def toleration(text: str) -> Manifest:
    """Return the toleration `all`, `KEY` or `K=V:EFFECT,OPERATOR`. Raises InvalidRequest."""
    if text == "all":
        return {"operator": "Exists"}
    match = _TOLERATION.fullmatch(text)
    if match is None:
        raise InvalidRequest(
            f"invalid --toleration {text[:80]!r}: expected all, KEY or K=V:EFFECT, for example "
            "team=vision:NoSchedule"
        )
    fields = {
        "key": match["key"],
        "operator": match["operator"] or ("Equal" if match["value"] is not None else "Exists"),
        "value": match["value"],
        "effect": match["effect"],
    }
    if fields["operator"] == "Exists":
        del fields["value"]
    return without_empty(fields)


_TOLERATION = re.compile(
    r"(?P<key>[A-Za-z0-9][A-Za-z0-9._/-]*)(?:=(?P<value>[A-Za-z0-9._-]*))?"
    r"(?::(?P<effect>NoSchedule|PreferNoSchedule|NoExecute))?(?:,(?P<operator>Equal|Exists))?"
)


def escape(text: str) -> str:
    """Return the text so that the kubelet expands nothing in it."""
    return re.sub(r"\$(?=[$(])", "$$", text)


def without_empty(fields: Manifest) -> Manifest:
    """Return the fields that have a value."""
    return {name: value for name, value in fields.items() if value not in (None, "", [], {})}
