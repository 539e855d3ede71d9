"""Why a pod waits or runs, as lines of text: of `fenka why` and of the dashboard's page."""

from collections.abc import Callable, Iterable, Mapping, Sequence

from fenka.cluster.autoscaling import AutoscalerStatus, OrderRecord
from fenka.cluster.explain import (
    NodeVerdict,
    PodExplanation,
    explain_by_events,
    explain_scale_out,
)
from fenka.cluster.objects import Event, Pod
from fenka.core.errors import listed

MAX_NAMES = 3
"""Nodes to name of those that have the same reasons."""


def explain_growth(
    explanation: PodExplanation,
    pod: Pod,
    published: tuple[AutoscalerStatus | None, Mapping[str, OrderRecord]] | None,
    events: Iterable[Event],
    now: float,
) -> None:
    """Add to a pending pod's explanation what an autoscaler does for it.

    Args:
        explanation: of the pod.
        pod: the pod.
        published: status and orders of fenka's autoscaler; None without it.
        events: of the pod, by which another autoscaler tells.
        now: Unix seconds.
    """
    if explanation.state != "pending":
        return
    if published is None:
        scale_out = explain_by_events(events, now)
    else:
        status, orders = published
        scale_out = explain_scale_out(pod, status or AutoscalerStatus(), orders, now)
    if scale_out is not None:
        explanation.scale_out = scale_out.sentence
        # Other hints are not needed if a node comes.
        if scale_out.coming:
            explanation.hints, explanation.never = [], ""


def explanation_lines(
    explanation: PodExplanation, align: Callable[[Sequence[Sequence[str]]], list[str]]
) -> list[str]:
    """Return the explanation as text. align: returns the lines of a table."""
    lines = [explanation.summary]
    lines += [f"It can never start as it is: {explanation.never}."] if explanation.never else []
    lines += [f"It {explanation.scale_out}."] if explanation.scale_out else []
    lines += [f"It holds {piece}." for piece in explanation.slices]
    if explanation.message:
        lines += ["", f"{explanation.scheduler} says: {explanation.message}"]
        lines += [f"That is: {explanation.extender}."] if explanation.extender else []
    lines += _section("Its containers wait:", explanation.containers)
    if explanation.nodes:
        lines += [
            "",
            *align([("NODE", "VERDICT"), *_grouped(explanation.nodes)]),
        ]
    lines += ["", f"By the cards: {explanation.sentence}."] if explanation.sentence else []
    lines += _section("To be known:", explanation.notes)
    lines += _section("Warnings, the newest first:", explanation.events)
    return [*lines, *_section("What helps:", explanation.hints)]


def _section(title: str, items: Sequence[str]) -> list[str]:
    return ["", title, *(f"  - {item}" for item in items)] if items else []


def _grouped(verdicts: Sequence[NodeVerdict]) -> list[tuple[str, str]]:
    """Put nodes with the same reasons on one line; those without a GPU come last."""
    groups: dict[tuple[bool, str], list[str]] = {}
    for verdict in sorted(verdicts, key=lambda verdict: not verdict.gpu):
        text = "has room" if verdict.fits else "; ".join(verdict.reasons)
        groups.setdefault((verdict.gpu, text), []).append(verdict.node)
    return [(listed(names, MAX_NAMES), text) for (_, text), names in groups.items()]
