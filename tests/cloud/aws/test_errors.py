"""What AWS's errors mean, and what an Auto Scaling group must be: tables."""

from typing import Any

import pytest
from botocore.exceptions import (
    ClientError,
    ConnectionClosedError,
    CredentialRetrievalError,
    EndpointConnectionError,
    NoCredentialsError,
    ParamValidationError,
    ReadTimeoutError,
)
from botocore.parsers import ResponseParserError
from msgspec.structs import replace

from fenka.cloud.aws.boto import port_error, port_errors
from fenka.cloud.aws.provider import room, unfit
from fenka.cloud.config import GroupConfig, SpotRules
from fenka.cloud.port import (
    Denied,
    OfferKey,
    OutOfStock,
    ProviderError,
    Quota,
    Throttled,
    TooDear,
    Unknown,
)

OFFER = OfferKey("t4", "g4dn.xlarge", "us-east-1a", "spot")


@pytest.mark.parametrize(
    ("code", "status", "expected"),
    [
        ("InsufficientInstanceCapacity", 400, OutOfStock),
        # EC2 answers this one with 500: it is a definite no all the same.
        ("InsufficientInstanceCapacity", 500, OutOfStock),
        ("UnfulfillableCapacity", 400, OutOfStock),
        ("Unsupported", 400, OutOfStock),
        ("MaxSpotInstanceCountExceeded", 400, OutOfStock),
        ("InsufficientFreeAddressesInSubnet", 400, OutOfStock),
        ("SpotMaxPriceTooLow", 400, TooDear),
        ("VcpuLimitExceeded", 400, Quota),
        ("MaxFleetCountExceeded", 400, Quota),
        ("RequestLimitExceeded", 503, Throttled),
        ("Throttling", 400, Throttled),
        ("ResourceContentionFault", 500, Throttled),
        ("ScalingActivityInProgressFault", 400, Throttled),
        ("IdempotentCallInProgressFault", 400, Unknown),
        ("InternalError", 500, Unknown),
        ("ServiceUnavailable", 503, Unknown),
        ("UnauthorizedOperation", 403, Denied),
        ("IdempotentParameterMismatch", 400, Denied),
        ("SomethingNew", 400, Denied),
    ],
)
def test_code_is_the_ports_error(code: str, status: int, expected: type[ProviderError]) -> None:
    """By the code where it is known, else by HTTP's status."""
    error = port_error(code, "why", status, OFFER, (5.0, 4.0))
    assert type(error) is expected
    raised = ClientError(
        {"Error": {"Code": code, "Message": "why"}, "ResponseMetadata": {"HTTPStatusCode": status}},
        "CreateFleet",
    )
    with pytest.raises(expected), port_errors(OFFER):
        raise raised


@pytest.mark.parametrize(
    ("raised", "expected"),
    [
        (EndpointConnectionError(endpoint_url="https://x"), Unknown),
        (ConnectionClosedError(endpoint_url="https://x"), Unknown),
        (ReadTimeoutError(endpoint_url="https://x"), Unknown),
        (ResponseParserError("not XML"), Unknown),
        (CredentialRetrievalError(provider="iam", error_msg="timeout"), Unknown),
        (NoCredentialsError(), Denied),
        (ParamValidationError(report="bad"), Denied),
    ],
)
def test_failure_of_a_call_is_unknown_unless_it_was_never_sent(
    raised: Exception, expected: type[ProviderError]
) -> None:
    """The same token finds out."""
    with pytest.raises(expected), port_errors(OFFER):
        raise raised


def test_stock_is_no_error_of_calls_without_an_offer() -> None:
    """Such a code means nothing there."""
    assert type(port_error("Unsupported", "why")) is Denied


GROUP = GroupConfig(name="t4", id="asg", types=("g4dn.xlarge",), zones=("a", "b"), min=1)
SPOT = replace(GROUP, capacity="spot", spot=SpotRules(cap=4.0))
TAG = {"Key": "fenka.io/cluster", "Value": "demo", "PropagateAtLaunch": True}


def described(**more: Any) -> dict[str, Any]:
    """Return a group that fits."""
    return {
        "Tags": [TAG],
        "LaunchTemplate": {"LaunchTemplateName": "t"},
        "AvailabilityZones": ["a", "b"],
        "SuspendedProcesses": [{"ProcessName": "AZRebalance"}],
        "MinSize": 1,
        "MaxSize": 10,
        "DesiredCapacity": 4,
    } | more


def mixed(**distribution: Any) -> dict[str, Any]:
    """Return a group with several markets."""
    policy = {"InstancesDistribution": distribution}
    return described(LaunchTemplate=None, MixedInstancesPolicy=policy)


ONLY_SPOT = {"OnDemandBaseCapacity": 0, "OnDemandPercentageAboveBaseCapacity": 0}


@pytest.mark.parametrize(
    ("group", "fields", "sentence"),
    [
        (GROUP, described(), ""),
        (GROUP, described(Tags=[]), "add this tag"),
        (GROUP, described(Tags=[TAG | {"Value": "other"}]), "add this tag"),
        (GROUP, described(Tags=[TAG | {"PropagateAtLaunch": False}]), "add this tag"),
        (GROUP, described(LaunchTemplate=None), "wants a launch template"),
        (GROUP, described(AvailabilityZones=["a"]), "has no zone b"),
        (GROUP, described(SuspendedProcesses=[]), "suspend its process AZRebalance"),
        (GROUP, described(MinSize=2), "has MinSize 2, above min 1 of group t4"),
        (GROUP, mixed(OnDemandPercentageAboveBaseCapacity=50), "launches spot instances too"),
        (GROUP, mixed(OnDemandPercentageAboveBaseCapacity=100), ""),
        (SPOT, described(), "has no MixedInstancesPolicy"),
        (SPOT, mixed(**ONLY_SPOT, SpotMaxPrice="4"), ""),
        (SPOT, mixed(**ONLY_SPOT, SpotMaxPrice="4.1"), "so that the cap of 4 cannot be kept"),
        (SPOT, mixed(**ONLY_SPOT), "has SpotMaxPrice unset"),
        (SPOT, mixed(OnDemandBaseCapacity=1), "launches on-demand instances too"),
        (replace(SPOT, spot=SpotRules()), mixed(**ONLY_SPOT), ""),
    ],
)
def test_group_is_unfit_when_aws_would_decide_about_its_nodes(
    group: GroupConfig, fields: dict[str, Any], sentence: str
) -> None:
    """The sentence says what to change."""
    why = unfit(group, "demo", fields)
    assert sentence in why
    assert bool(sentence) == bool(why)


def test_room_is_what_the_maximum_leaves() -> None:
    """10 - 4; a group above its maximum has none."""
    assert room(described()) == 6
    assert room(described(DesiredCapacity=12)) == 0
