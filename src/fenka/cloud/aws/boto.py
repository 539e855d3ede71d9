"""Calls AWS in threads, because boto3 blocks, and translates its errors. The autoscaler repeats calls.

Sources of the codes: the API references of EC2 and of EC2 Auto Scaling. A code that is not listed is a
definite no for a status below 500, and tells nothing otherwise.
"""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import boto3
from botocore.config import Config as BotoConfig
from botocore.exceptions import (
    BotoCoreError,
    ClientError,
    CredentialRetrievalError,
    HTTPClientError,
)
from botocore.exceptions import ConnectionError as NoConnection
from botocore.parsers import ResponseParserError

from fenka.cloud import port

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
    offer: port.OfferKey | None = None,
    prices: tuple[float, float] = (0.0, 0.0),
) -> port.ProviderError:
    """Return the port's error.

    Args:
        status: HTTP's.
        offer: what was asked for, if anything.
        prices: the market's and the order's cap.
    """
    code = code.removesuffix("Fault").removesuffix("Exception")
    if offer is not None and code in OUT_OF_STOCK:
        return port.OutOfStock(offer)
    if offer is not None and code in TOO_DEAR:
        return port.TooDear(offer, *prices)
    if offer is not None and code in QUOTA:
        return port.Quota(offer.group)
    if code in THROTTLED:
        return port.Throttled()
    if code in UNKNOWN or status >= 500:
        return port.Unknown(f"AWS does not say whether it was done: {code}: {message}")
    return port.Denied(f"AWS refuses: {code}: {message}")


@contextmanager
def port_errors(offer: port.OfferKey | None = None) -> Iterator[None]:
    """Raise the port's errors for boto3's."""
    try:
        yield
    except ClientError as why:
        error = why.response["Error"]
        status = why.response["ResponseMetadata"]["HTTPStatusCode"]
        raise port_error(error["Code"], error["Message"], status, offer) from None
    except (HTTPClientError, NoConnection, ResponseParserError, CredentialRetrievalError) as why:
        raise port.Unknown(f"AWS does not answer: {why}") from None
    except BotoCoreError as why:
        raise port.Denied(f"AWS cannot be asked: {why}") from None


CONNECT_S, READ_S = 5, 60
"""Limits of a call. LaunchInstances answers when the instances are there."""

Answer = dict[str, Any]


class Calls:
    """EC2 and Auto Scaling of one region. Every method may raise ProviderError."""

    def __init__(self, region: str, endpoint: str | None = None) -> None:
        """Use the credentials of boto3's usual chain.

        Args:
            region: empty for that of the environment.
            endpoint: a URL in place of Amazon's.
        """
        settings = BotoConfig(
            connect_timeout=CONNECT_S, read_timeout=READ_S, retries={"total_max_attempts": 1}
        )
        with port_errors():
            session = boto3.Session(region_name=region or None)
            self._clients = {
                service: session.client(service, endpoint_url=endpoint, config=settings)
                for service in ("ec2", "autoscaling")
            }

    async def ec2(
        self, action: str, offer: port.OfferKey | None = None, **parameters: Any
    ) -> Answer:
        """Return EC2's answer. offer: what is asked for, for the error."""
        return await asyncio.to_thread(self._call, "ec2", action, offer, parameters)

    async def autoscaling(
        self, action: str, offer: port.OfferKey | None = None, **parameters: Any
    ) -> Answer:
        """Return the answer of Auto Scaling. offer: what is asked for, for the error."""
        return await asyncio.to_thread(self._call, "autoscaling", action, offer, parameters)

    async def pages(self, service: str, action: str, key: str, **parameters: Any) -> list[Answer]:
        """Return what all pages of an answer list under a key; never a part of them."""
        return await asyncio.to_thread(self._pages, service, action, key, parameters)

    def close(self) -> None:
        """Close all connections."""
        for client in self._clients.values():
            client.close()

    def _call(
        self, service: str, action: str, offer: port.OfferKey | None, parameters: Answer
    ) -> Answer:
        with port_errors(offer):
            answer: Answer = getattr(self._clients[service], action)(**parameters)
            return answer

    def _pages(self, service: str, action: str, key: str, parameters: Answer) -> list[Answer]:
        with port_errors():
            pages = self._clients[service].get_paginator(action).paginate(**parameters)
            return [item for page in pages for item in page[key]]


def tag(key: str, value: str) -> Answer:
    """Return a tag as EC2 writes it."""
    return {"Key": key, "Value": value}


def tags_of(described: Answer) -> dict[str, str]:
    """Return the tags of something described."""
    return {pair["Key"]: pair["Value"] for pair in described.get("Tags", ())}
