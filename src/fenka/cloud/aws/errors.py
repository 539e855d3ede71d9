"""What AWS's errors mean to the port. Sources: the API references of EC2 and of EC2 Auto Scaling.

A code that is not listed is a definite no for a status below 500, and tells nothing otherwise.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from botocore.exceptions import (
    BotoCoreError,
    ClientError,
    CredentialRetrievalError,
    HTTPClientError,
)
from botocore.exceptions import ConnectionError as NoConnection
from botocore.parsers import ResponseParserError

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

AFTER_S = 5.0
"""Until the next call after throttling; AWS does not say how long."""

OUT_OF_STOCK = frozenset(
    {
        "InsufficientInstanceCapacity",
        "UnfulfillableCapacity",
        "Unsupported",
        "MaxSpotInstanceCountExceeded",
        "InsufficientFreeAddressesInSubnet",
    }
)
TOO_DEAR = frozenset({"SpotMaxPriceTooLow"})
QUOTA = frozenset({"VcpuLimitExceeded", "MaxFleetCountExceeded", "InstanceLimitExceeded"})
THROTTLED = frozenset(
    {
        "Throttling",
        "ThrottlingException",
        "RequestLimitExceeded",
        "RequestThrottled",
        # Another change of the group is under way, and nothing was done.
        "ResourceContention",
        "ScalingActivityInProgress",
    }
)
UNKNOWN = frozenset({"IdempotentCallInProgress", "RequestTimeout"})
"""The first call with this token is still under way."""


def port_error(
    code: str,
    message: str,
    status: int = 400,
    offer: OfferKey | None = None,
    prices: tuple[float, float] = (0.0, 0.0),
) -> ProviderError:
    """Return the port's error.

    Args:
        status: HTTP's.
        offer: what was asked for, if anything.
        prices: the market's and the order's cap.
    """
    code = code.removesuffix("Fault").removesuffix("Exception")
    if offer is not None and code in OUT_OF_STOCK:
        return OutOfStock(offer)
    if offer is not None and code in TOO_DEAR:
        return TooDear(offer, *prices)
    if offer is not None and code in QUOTA:
        return Quota(offer.group)
    if code in THROTTLED:
        return Throttled(AFTER_S)
    if code in UNKNOWN or status >= 500:
        return Unknown(f"AWS does not say whether it was done: {code}: {message}")
    return Denied(f"AWS refuses: {code}: {message}")


@contextmanager
def port_errors(offer: OfferKey | None = None) -> Iterator[None]:
    """Raise the port's errors for boto3's."""
    try:
        yield
    except ClientError as why:
        error = why.response["Error"]
        status = why.response["ResponseMetadata"]["HTTPStatusCode"]
        raise port_error(error["Code"], error["Message"], status, offer) from None
    except (HTTPClientError, NoConnection, ResponseParserError, CredentialRetrievalError) as why:
        raise Unknown(f"AWS does not answer: {why}") from None
    except BotoCoreError as why:
        raise Denied(f"AWS cannot be asked: {why}") from None
