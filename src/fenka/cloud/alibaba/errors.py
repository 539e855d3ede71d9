"""Alibaba Cloud's errors as those of the port."""

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

RETRY_S = 5.0


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
        return Throttled(RETRY_S, spent=True)
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
        return Throttled(RETRY_S)
    if status is None or not 400 <= status < 500:
        return Unknown(
            f"Alibaba Cloud gave no answer that says whether it was done: {code or message}"
        )
    return refused(code, message, offer)
