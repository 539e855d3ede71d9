"""Calls of Alibaba Cloud's SDK: clients, time limits, pages, and errors as those of the port."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any

from alibabacloud_credentials.client import Client as Credentials
from alibabacloud_credentials.exceptions import CredentialException
from alibabacloud_ecs20140526.client import Client as EcsClient
from alibabacloud_ess20220222.client import Client as EssClient
from alibabacloud_tea_openapi.exceptions import AlibabaCloudException
from alibabacloud_tea_openapi.utils_models import Config as SdkConfig
from Tea.exceptions import TeaException

from fenka.cloud.alibaba.settings import EssProviderConfig
from fenka.cloud.port import Denied, OfferKey, OutOfStock, ProviderError, Quota, Throttled, Unknown

OUT_OF_STOCK = frozenset(
    {
        "InvalidVSwitchId.IpNotEnough",
        "OperationDenied.NoStock",
        "QuotaExceeded.PrivateIpAddress",
        "Zone.NotOnSale",
    }
)
TOO_DEAR = frozenset(
    {"InvalidSpotPriceLimit.LowerThanPublicPrice", "OperationDenied.SpotPriceLowerThanPublicPrice"}
)
BUSY = frozenset({"IncorrectScalingGroupStatus", "ScalingActivityInProgress"})
"""The scaling group does something else; a later call may succeed."""


class MarketAboveCap(Exception):
    """The market's price is above the limit of a launch. The cloud does not say the price."""


def refused(code: str, message: str, offer: OfferKey | None) -> ProviderError | MarketAboveCap:
    """Return the error for a code that means that nothing was done.

    Args:
        code: of the answer, or of a scaling activity.
        message: of the cloud.
        offer: that should be launched, None for other calls.
    """
    if code.startswith("Throttling") or code in BUSY:
        return Throttled(spent=True)
    if offer is not None and code in OUT_OF_STOCK:
        return OutOfStock(offer)
    if offer is not None and code in TOO_DEAR:
        return MarketAboveCap()
    if offer is not None and code.startswith("QuotaExceed"):
        return Quota(offer.group)
    if offer is None and code == "InvalidInstanceId.NotFound":
        return Unknown("an instance went away while it was being ended")
    return Denied(f"Alibaba Cloud refused the call: {code}: {message}")


def failed(
    status: int | None, code: str, message: str, retry_ms: int | None, offer: OfferKey | None
) -> ProviderError | MarketAboveCap:
    """Return the error for a call that failed.

    Args:
        status: of HTTP, None if there was no answer.
        code: of the answer.
        message: of the cloud, or what went wrong.
        retry_ms: when to call again, None if the cloud did not say so.
        offer: that should be launched, None for other calls.
    """
    if retry_ms is not None:
        return Throttled(retry_ms / 1000)
    if code.startswith("Throttling"):
        # A gateway throttles, also with 503. It does not know what became of the order.
        return Throttled()
    if status is None or not 400 <= status < 500:
        return Unknown(
            f"Alibaba Cloud gave no answer that says whether it was done: {code or message}"
        )
    return refused(code, message, offer)


CONNECT_MS, READ_MS, CALL_S = 5_000, 15_000, 30.0
ESS_PAGE = 50


def default_credentials() -> Any:
    """Return what the SDK's default chain has: the environment, a profile, or the machine's RAM role."""
    # The SDK looks every minute whether credentials are to be renewed, and its scheduler logs each look.
    logging.getLogger("apscheduler").setLevel(logging.WARNING)
    return Credentials()


def open_clients(settings: EssProviderConfig, credentials: Any) -> tuple[Any, Any]:
    """Return the clients of ESS and ECS."""

    def config(endpoint: str) -> Any:
        return SdkConfig(
            credential=credentials,
            region_id=settings.region,
            endpoint=endpoint or None,
            protocol=settings.protocol,
            connect_timeout=CONNECT_MS,
            read_timeout=READ_MS,
        )

    return EssClient(config(settings.ess_endpoint)), EcsClient(config(settings.ecs_endpoint))


async def call(
    method: Callable[[Any], Awaitable[Any]], request: Any, offer: OfferKey | None = None
) -> Any:
    """Call a method of a client. Return the answer's body.

    Args:
        method: such as `client.run_instances_async`.
        request: of the SDK.
        offer: that is launched, for errors.

    Raises:
        ProviderError: the call failed.
        MarketAboveCap: a launch was refused because of the market's price.
    """
    try:
        async with asyncio.timeout(CALL_S):
            return (await method(request)).body
    except AlibabaCloudException as why:
        retry_ms = getattr(why, "retry_after", None)
        raise failed(why.status_code, why.code or "", why.message or "", retry_ms, offer) from why
    except CredentialException as why:
        raise Denied(_NO_CREDENTIALS) from why
    except TeaException as why:
        if isinstance(getattr(why, "inner_exception", None), CredentialException):
            raise Denied(_NO_CREDENTIALS) from why
        raise Unknown(f"Alibaba Cloud did not answer: {why}") from why
    except (OSError, ValueError, TypeError, AttributeError) as why:
        # The SDK fails so for a body that it cannot read. Such a launch may have succeeded.
        raise Unknown(f"Alibaba Cloud's answer is not understood: {why}") from why


_NO_CREDENTIALS = (
    "there are no credentials for Alibaba Cloud: set ALIBABA_CLOUD_ACCESS_KEY_ID and "
    "ALIBABA_CLOUD_ACCESS_KEY_SECRET, or give the pod a RAM role"
)


async def all_ess(
    method: Callable[[Any], Awaitable[Any]], request: Any, items: Callable[[Any], list[Any] | None]
) -> list[Any]:
    """Return the items of all pages of a list of ESS. Raises Unknown if the list changed meanwhile."""
    listed: list[Any] = []
    total = None
    request.page_size = ESS_PAGE
    while total is None or len(listed) < total:
        request.page_number = len(listed) // ESS_PAGE + 1
        body = await call(method, request)
        page = items(body)
        if page is None or body.total_count is None:
            raise Unknown("Alibaba Cloud listed a page without its items")
        if total not in (None, body.total_count) or len(page) != min(
            ESS_PAGE, body.total_count - len(listed)
        ):
            raise Unknown("Alibaba Cloud's list changed while it was read")
        total = body.total_count
        listed += page
    return listed
