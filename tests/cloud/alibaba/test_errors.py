"""What the cloud's errors mean for an order: the table, and calls that fail on their way."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from alibabacloud_credentials.exceptions import CredentialException

from fenka.cloud.alibaba import sdk
from fenka.cloud.alibaba.ess import EssProvider
from fenka.cloud.alibaba.sdk import MarketAboveCap, failed
from fenka.cloud.port import Denied, Order, OutOfStock, Quota, Throttled, Unknown
from tests.cloud.alibaba.harness import EXACT, AlibabaCloud
from tests.cloud.alibaba.state import Fault
from tests.cloud.contract import ON_DEMAND


@pytest.mark.parametrize(
    ("status", "code", "expected"),
    [
        (403, "OperationDenied.NoStock", OutOfStock),
        (400, "Zone.NotOnSale", OutOfStock),
        (400, "InvalidVSwitchId.IpNotEnough", OutOfStock),
        (400, "QuotaExceeded.PrivateIpAddress", OutOfStock),
        (400, "InvalidSpotPriceLimit.LowerThanPublicPrice", MarketAboveCap),
        (403, "OperationDenied.SpotPriceLowerThanPublicPrice", MarketAboveCap),
        (403, "QuotaExceed.ElasticQuota", Quota),
        (400, "QuotaExceeded", Quota),
        (400, "ScalingActivityInProgress", Throttled),
        (400, "IncorrectScalingGroupStatus", Throttled),
        (400, "Throttling.User", Throttled),
        (429, "Throttling", Throttled),
        (503, "Throttling.Api", Throttled),
        (500, "InternalError", Unknown),
        (503, "ServiceUnavailable", Unknown),
        (None, "", Unknown),
        (302, "", Unknown),
        (403, "Forbidden.RAM", Denied),
        (400, "SignatureDoesNotMatch", Denied),
        (404, "InvalidAccessKeyId.NotFound", Denied),
        (400, "IdempotentParameterMismatch", Denied),
        (403, "InvalidLaunchTemplate.NotFound", Denied),
        (400, "Account.Arrearage", Denied),
    ],
)
def test_error_of_a_launch_is_that_of_the_port(
    status: int | None, code: str, expected: type[Exception]
) -> None:
    """Only what surely was not done is a definite no."""
    assert type(failed(status, code, "why", None, ON_DEMAND)) is expected


@pytest.mark.parametrize(
    ("status", "code", "expected"),
    [
        (403, "OperationDenied.NoStock", Denied),
        (403, "QuotaExceed.ElasticQuota", Denied),
        (404, "InvalidInstanceId.NotFound", Unknown),
        (400, "IncorrectCapacity.MinSize", Denied),
        (400, "ScalingActivityInProgress", Throttled),
    ],
)
def test_error_of_another_call_is_that_of_the_port(
    status: int, code: str, expected: type[Exception]
) -> None:
    """Without an offer there is nothing to back off from."""
    assert type(failed(status, code, "why", None, None)) is expected


@pytest.mark.parametrize(("seconds", "after_s"), [(0.0, 5.0), (30.0, 30.0)])
async def test_throttling_says_when_to_call_again(
    cloud: AlibabaCloud, seconds: float, after_s: float
) -> None:
    """As the cloud says, if it does. Nothing was done."""
    cloud.fail("launch", "throttle", seconds)
    with pytest.raises(Throttled) as why:
        await cloud.provider.launch(Order("a-1", ON_DEMAND, 1))
    assert why.value.after_s == after_s
    assert not await cloud.provider.instances()


async def test_launch_is_unknown_when_the_cloud_fails(cloud: AlibabaCloud) -> None:
    """The same token then succeeds."""
    cloud.fail("launch", "error")
    with pytest.raises(Unknown, match="InternalError"):
        await cloud.provider.launch(Order("a-1", ON_DEMAND, 1))
    assert len(await cloud.provider.launch(Order("a-1", ON_DEMAND, 1))) == 1


async def test_call_is_unknown_when_it_takes_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """The deed may be done."""
    monkeypatch.setattr(sdk, "CALL_S", 0.0)

    async def never(_: Any) -> Any:
        await asyncio.Event().wait()

    with pytest.raises(Unknown):
        await sdk.call(never, None)


async def test_lost_answer_of_end_is_repeated_without_harm(cloud: AlibabaCloud) -> None:
    """The instances are gone the second time."""
    ids = await cloud.provider.launch(Order("a-1", ON_DEMAND, 2))
    cloud.folder.add_fault(Fault("DeleteInstances", "lose-answer"))
    with pytest.raises(Unknown):
        await cloud.provider.end(ids[:1])
    await cloud.provider.end(ids[:1])
    assert [it.id for it in await cloud.provider.instances()] == list(ids[1:])


async def test_wrong_secret_is_denied(cloud: AlibabaCloud) -> None:
    """It says what the cloud said, the same each time, and never the secret."""
    provider = cloud.open(EXACT, secret="wrong-secret")
    sentences = set[str]()
    for call in (provider.offers, provider.instances, provider.notices, provider.notices):
        with pytest.raises(Denied, match="SignatureDoesNotMatch") as why:
            await call()
        assert "wrong-secret" not in str(why.value)
        sentences.add(str(why.value))
    assert len(sentences) == 1


@pytest.mark.parametrize("wrapped", [False, True])
async def test_missing_credentials_are_denied(wrapped: bool) -> None:
    """The sentence names the variables to set. The SDK wraps some of its errors."""

    async def refuse(_: Any) -> Any:
        why = CredentialException("unable to load credentials from any of the providers")
        if not wrapped:
            raise why
        from darabonba.exceptions import UnretryableException
        from darabonba.policy.retry import RetryPolicyContext

        raise UnretryableException(RetryPolicyContext(exception=why))

    with pytest.raises(Denied, match="set ALIBABA_CLOUD_ACCESS_KEY_ID"):
        await sdk.call(refuse, None)


@pytest.mark.parametrize(
    "body",
    [
        SimpleNamespace(instances=None, next_token=""),
        SimpleNamespace(instances=SimpleNamespace(instance=[]), next_token="again"),
    ],
)
async def test_list_without_an_end_is_unknown(cloud: AlibabaCloud, body: Any) -> None:
    """A page without its instances, and one that names itself as the next one."""

    async def answer(_: Any) -> Any:
        return SimpleNamespace(body=body)

    provider = _with_client(cloud, SimpleNamespace(describe_instances_async=answer))
    with pytest.raises(Unknown):
        await provider.instances()


@pytest.mark.parametrize("sizes", [(50, 10), (50, 50, 0)])
async def test_list_of_a_scaling_group_is_unknown_when_it_changes(sizes: tuple[int, ...]) -> None:
    """Pages that are shorter than their list says."""
    pages = iter(sizes)

    async def answer(_: Any) -> Any:
        return SimpleNamespace(body=SimpleNamespace(total_count=120, found=[0] * next(pages)))

    with pytest.raises(Unknown, match="changed while it was read"):
        await sdk.all_ess(answer, SimpleNamespace(), lambda body: list(body.found))


async def test_state_of_an_instance_that_is_not_known_is_unknown(cloud: AlibabaCloud) -> None:
    """It must not be taken for gone or for running."""

    async def answer(_: Any) -> Any:
        odd = SimpleNamespace(instance_id="i-1", tags=None, status="Dancing")
        found = SimpleNamespace(instances=SimpleNamespace(instance=[odd]), next_token="")
        return SimpleNamespace(body=found)

    provider = _with_client(cloud, SimpleNamespace(describe_instances_async=answer))
    with pytest.raises(Unknown, match="Dancing"):
        await provider.instances()


def _with_client(cloud: AlibabaCloud, ecs: Any) -> EssProvider:
    return cloud.open(EXACT, ecs=ecs)
