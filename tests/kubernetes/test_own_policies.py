"""Refusals by fenka's own admission policies, which are loud because chart and program do not fit then."""

import logging
import re
from pathlib import Path

import pytest
from aiohttp import web

from fenka.cluster.objects import ApiStatus
from fenka.kubernetes.api_client import ApiError
from fenka.kubernetes.own_policies import OwnRefusals, is_own
from tests.fakes.api_server import api_server

DENIED = (
    "bindings \"p\" is forbidden: ValidatingAdmissionPolicy 'fenka-binding' with binding 'fenka-binding' "
    "denied request: the scheduler may write only the records of a pod's card with its binding"
)
MESSAGES = (
    "the scheduler may write only the records of a pod's card with its binding",
    "system:serviceaccount:fenka:fenka-scheduler may not write metadata.labels x",
    "the node program of n may write only its own node and pods",
    "this token of the node program names no node, as tokens of its pods do",
)


async def test_log_has_an_error_when_an_own_policy_refuses_a_binding(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Whichever request was refused, and whatever its caller does with the refusal."""

    async def refuse(_: web.Request) -> web.StreamResponse:
        return web.json_response({"message": DENIED, "code": 403}, status=403)

    async with api_server() as server, server.api() as api:
        server.before = refuse
        with pytest.raises(ApiError):
            await api.create("/api/v1/namespaces/x/pods/p/binding", ApiStatus, {})
    (record,) = [r for r in caplog.records if r.levelno == logging.ERROR]
    assert DENIED in record.getMessage()
    assert "helm upgrade" in record.getMessage()


@pytest.mark.parametrize("message", MESSAGES)
def test_refusal_is_own_when_the_chart_has_its_sentence(message: str) -> None:
    """The sentences are those of the chart. It has names that a template inserts in their place."""
    chart = Path("deploy/chart/templates/own-accounts.yaml").read_text()
    inserted = r"metadata.labels x|system:serviceaccount:\S+|(?<=program of )n(?= may)"
    parts = [part for part in re.split(inserted, message) if part.strip()]
    assert parts
    assert all(part in chart for part in parts)
    denied = f"ValidatingAdmissionPolicy 'a' with binding 'a' denied request: {message}"
    assert is_own(403, denied)
    assert is_own(422, denied)


@pytest.mark.parametrize(
    ("status", "message"),
    [
        (403, "ValidatingAdmissionPolicy 'x' with binding 'x' denied request: no card on Mondays"),
        (403, MESSAGES[0]),
        (500, DENIED),
        # The policy repeats what a tenant has written.
        (
            403,
            "pods \"p\" is forbidden: ValidatingAdmissionPolicy 'x' with binding 'y' denied request: "
            f"the label {DENIED} is not allowed",
        ),
    ],
)
def test_refusal_is_not_own_when_another_program_refuses(status: int, message: str) -> None:
    """Others' policies are their owners' decision."""
    assert not is_own(status, message)


def test_log_repeats_a_refusal_when_a_minute_has_passed(caplog: pytest.LogCaptureFixture) -> None:
    """The same sentence about another object is the same refusal."""
    now = [0.0]
    refusals = OwnRefusals(lambda: now[0])
    for at, message in ((0, DENIED), (1, DENIED.replace('"p"', '"q"')), (61, DENIED)):
        now[0] = at
        refusals.heard(403, message)
    assert len(caplog.records) == 2


def test_log_stays_short_when_sentences_vary(caplog: pytest.LogCaptureFixture) -> None:
    """A sentence may name what a tenant has written. The log goes on after a minute."""
    now = [0.0]
    refusals = OwnRefusals(lambda: now[0])
    for number in range(1000):
        refusals.heard(403, f"{DENIED} {number}")
    in_a_minute = len(caplog.records)
    now[0] = 61
    refusals.heard(403, f"{DENIED} 999")
    assert 1 < in_a_minute <= 20
    assert len(caplog.records) == in_a_minute + 1


def test_refusal_counts_as_the_same_when_only_its_end_varies(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A refusal of any length is remembered by what is logged of it."""
    refusals = OwnRefusals()
    for end in ("a", "b"):
        refusals.heard(403, DENIED + "x" * 10_000_000 + end)
    assert len(caplog.records) == 1
    assert sum(map(len, refusals._logged)) < 1000
