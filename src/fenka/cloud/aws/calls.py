"""Calls AWS in threads, because boto3 blocks. Nothing is repeated here: the autoscaler does that."""

import asyncio
from collections.abc import Sequence
from typing import Any

import boto3
from botocore.config import Config as BotoConfig

from fenka.cloud.aws.errors import port_errors
from fenka.cloud.port import OfferKey

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

    async def ec2(self, action: str, offer: OfferKey | None = None, **parameters: Any) -> Answer:
        """Return EC2's answer. offer: what is asked for, for the error."""
        return await asyncio.to_thread(self._call, "ec2", action, offer, parameters)

    async def autoscaling(
        self, action: str, offer: OfferKey | None = None, **parameters: Any
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
        self, service: str, action: str, offer: OfferKey | None, parameters: Answer
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
    return {each["Key"]: each["Value"] for each in described.get("Tags", ())}


def in_parts(ids: Sequence[str], most: int) -> list[Sequence[str]]:
    """Return ids in parts that one call may have."""
    return [ids[start : start + most] for start in range(0, len(ids), most)]
