"""Divides requests among a service's versions by a HTTPRoute of the Gateway API, without fenka's gateway.

The route leads to the versions' own Services. Wire facts: gateway.networking.k8s.io/v1.
"""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from fenka.cluster import service_objects
from fenka.jobs.kubernetes import (
    service_state,
)
from fenka.jobs.kubernetes.checks import SubmissionRefused
from fenka.kubernetes.api_client import Api, if_accepted

_API = "/apis/gateway.networking.k8s.io/v1"


_PORT = "http-serving"


Ref = dict[str, Any]


async def split_route(
    api: Api, state: service_state.ServiceState, route: str, weights: Mapping[str, int]
) -> None:
    """Set the weights of versions that exist, in all rules of a route that lead to the service.

    Raises SubmissionRefused, ApiError, ApiUnreachable.
    """
    path = f"{_API}/namespaces/{state.namespace}/httproutes/{route}"
    known = await if_accepted(api.get(path, dict[str, Any]))
    if known is None:
        installed = await if_accepted(api.get(_API, msgspec.Raw))
        reason = (
            f"HTTPRoute {route} not found in namespace {state.namespace}: create it, or leave out "
            "--http-route"
            if installed is not None
            else "--http-route requires the Gateway API, which this cluster does not have: leave it out"
        )
        raise SubmissionRefused(reason)
    ports = await asyncio.gather(*(_port(api, state, version) for version in weights))
    refs = [
        {"kind": "Service", "name": f"{state.name}-{version}", "port": port, "weight": weight}
        for (version, weight), port in zip(weights.items(), ports, strict=True)
    ]
    rules = replaced_rules(known.get("spec", {}).get("rules") or [], state, refs)
    if not rules:
        raise SubmissionRefused(
            f"HTTPRoute {route} has no rule that leads to service {state.name}: add a backendRef of Service "
            f"{state.name} to it"
        )
    version = known["metadata"]["resourceVersion"]
    changes = {"metadata": {"resourceVersion": version}, "spec": {"rules": rules}}
    await api.patch(path, msgspec.Raw, changes)


def replaced_rules(
    rules: Sequence[dict[str, Any]], state: service_state.ServiceState, refs: Sequence[Ref]
) -> list[dict[str, Any]]:
    """Return the rules, with `refs` in place of those to the service; nothing if there are none."""
    own = {state.name, *(f"{state.name}-{version}" for version in state.versions)}
    replaced, leads = [], False
    for rule in rules:
        others = [ref for ref in rule.get("backendRefs") or [] if not _leads_to(ref, own, state)]
        if len(others) == len(rule.get("backendRefs") or []):
            replaced.append(rule)
            continue
        leads = True
        replaced.append({**rule, "backendRefs": [*refs, *others]})
    return replaced if leads else []


def _leads_to(ref: Ref, names: set[str], state: service_state.ServiceState) -> bool:
    return (
        ref.get("kind", "Service") == "Service"
        and ref.get("namespace", state.namespace) == state.namespace
        and ref.get("name") in names
    )


async def _port(api: Api, state: service_state.ServiceState, version: str) -> int:
    path = (
        f"{service_objects.SERVICES_API.format(namespace=state.namespace)}/{state.name}-{version}"
    )
    service = await api.get(path, service_objects.AddressService)
    ports = {port.name: port.port for port in service.spec.ports}
    if _PORT not in ports:
        raise SubmissionRefused(
            f"version {version} of service {state.name} has no port of HTTP: leave out --http-route"
        )
    return ports[_PORT]
