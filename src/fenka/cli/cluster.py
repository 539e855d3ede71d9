"""Asks the kubeconfig's cluster. It is listed, not watched, because a screen is printed once."""

import asyncio
import re
import sys
from collections.abc import Awaitable, Callable
from typing import TypeVar

from fenka.cli.common_options import Target
from fenka.cli.error_report import UserError
from fenka.cli.startup import no_collection
from fenka.cli.tables import escape
from fenka.kubernetes import kube_config
from fenka.kubernetes.api_client import Api, ApiError, ApiUnreachable
from fenka.workstation import paths

T = TypeVar("T")

USER_ROLE = "fenka-user"
"""The chart's ClusterRole for trainings, notebooks and services of a namespace."""

_KEPT: list[object] = []

_DENIED = re.compile(
    r'User "([^"]*)" cannot (\w+) resource "([^"]*)"(?:.* in the namespace "([^"]*)")?'
)
"""The API server's sentence about a missing right."""

_ESCALATION = re.compile(r'user "([^"]*)" .*is attempting to grant RBAC permissions', re.DOTALL)
"""The API server's sentence about a Role with rights that its creator lacks."""


_WEBHOOK = re.compile(
    r'failed calling webhook "([\w.-]{1,253})"(?:.*?https://([\w-]{1,63})\.([\w-]{1,63})\.svc)?',
    re.DOTALL,
)
"""The API server's sentence about a webhook that it cannot reach: name, service and namespace."""


def ask(
    target: Target,
    question: Callable[[Api], Awaitable[T]],
    explain: Callable[[ApiError], str] = str,
) -> T:
    """Run a query with a client of the API server. Raises UserError if that fails.

    explain: returns the sentence for an error that the API server answers.
    """
    with no_collection():
        return converse(target, question, explain)


def keep(value: T) -> T:
    """Return the value, which is not freed before the process ends: for a cluster that takes 50 ms."""
    _KEPT[:] = [value]
    return value


def converse(
    target: Target,
    conversation: Callable[[Api], Awaitable[T]],
    explain: Callable[[ApiError], str] = str,
) -> T:
    """Use a client of the API server for as long as it takes. Otherwise like `ask`."""
    answers: list[T] = []

    async def connected() -> None:
        # Not returned: at its end asyncio.run formats the result, if only for an error that it discards.
        # For a cluster of a thousand nodes that takes half a second.
        async with await Api.connect(target.kubeconfig, target.context) as api:
            warnings = set[str]()

            def warn(text: str) -> None:
                # A dry run and the creation have the same.
                if text not in warnings:
                    warnings.add(text)
                    print(f"Warning: {escape(text)}", file=sys.stderr, flush=True)

            api.on_warning = warn
            answers.append(await conversation(api))

    try:
        asyncio.run(connected())
    except ApiUnreachable as why:
        raise UserError(str(why) if target.of_cluster else _neither(why)) from None
    except ApiError as why:
        raise UserError(_unanswered_webhook(why) or explain(why)) from None
    return answers[0]


def _unanswered_webhook(why: ApiError) -> str:
    """Return what to do if a webhook of the cluster does not answer; empty for any other error.

    JobSet's is such a one for some seconds after JobSet was installed.
    """
    called = _WEBHOOK.search(str(why)) if why.status >= 500 else None
    if called is None:
        return ""
    name, service, place = called.groups()
    where = f" (service {service} of namespace {place})" if service else ""
    pods = f": kubectl get pods -n {place}" if place else ""
    return (
        f"the webhook {name}{where} does not answer yet, and without it nothing was changed: wait until its "
        f"pods are ready{pods}, then try again"
    )


def explain_denial(why: ApiError) -> str:
    """Return what a user of training jobs without a right can do; else the API server's own sentence."""
    granted = _ESCALATION.search(str(why)) if why.status == 403 else None
    if granted is not None:
        return (
            f"user {granted[1]} may not give a service's gateway its rights: ask for the ClusterRole "
            "fenka-user"
        )
    return explain_cluster_denial(why, USER_ROLE)


async def or_served(api: Api, listed: Awaitable[list[T]], screen: str, row: type[T]) -> list[T]:
    """Return rows that are made from lists, or as the scheduler serves them to users who may not list.

    Raises ApiError, ApiUnreachable.
    """
    from fenka.kubernetes.reader import read_screen

    try:
        return await listed
    except ApiError as why:
        served = await read_screen(api, screen, row) if why.status == 403 else None
        if served is None:
            raise
        return served


def explain_screen_denial(why: ApiError) -> str:
    """Return what a user can do to whom neither lists nor the scheduler's screens are open."""
    return explain_cluster_denial(why, "fenka-queue")


def explain_cluster_denial(why: ApiError, role: str = "fenka-viewer") -> str:
    """Return what a user without a right can do; else the API server's own sentence."""
    denied = _DENIED.search(str(why)) if why.status == 403 else None
    if denied is None:
        return str(why)
    user, verb, resource, namespace = denied.groups()
    where = f" in namespace {namespace}" if namespace else ""
    if role == USER_ROLE and not namespace:
        hint = f"leave out -A, or ask for the ClusterRole {role} there"
        return f"user {user} may not {verb} {resource} in all namespaces: {hint}"
    return f"user {user} may not {verb} {resource}{where}: ask for the ClusterRole {role}"


def namespace(target: Target) -> str:
    """Return the namespace of the kubeconfig's context. Raises InvalidKubeConfig."""
    return kube_config.namespace(target.kubeconfig, target.context)


def _neither(why: ApiUnreachable) -> str:
    return (
        f"there is nothing to show: no fenka daemon answers at {paths.current().socket} (`fenka daemon` "
        f"starts one), and {why}"
    )
