"""A replica that does not lead passes kube-scheduler's calls on to the one that does.

So it is all one which replica the Service picks, and a node with any of them can be drained. Once only: a
call that was passed on is answered where it arrives, whoever leads by then.
"""

from collections.abc import AsyncIterator
from typing import Any

import aiohttp
from aiohttp import web

from fenka.core.errors import FenkaError
from fenka.scheduler.credentials import SERVER_NAME, Credentials

FORWARDED = "Fenka-Forwarded"
"""Header of a call that was passed on; its value is by whom."""

WITHIN_S = 4.8
"""More than the leader takes at most, less than the 5 s that kube-scheduler waits."""
CONNECT_WITHIN_S = 1.0
"""A node that is gone does not even refuse; kube-scheduler places nothing else while it waits for filter."""


class LeaderUnreachable(FenkaError):
    """The leader does not answer; the message says why."""


class LeaderProxy:
    """Connections to the leader, kept open. `running` is for aiohttp's cleanup_ctx.

    credentials: how this replica shows who it is, and knows the leader; None for plain HTTP.
    """

    def __init__(self, identity: str, credentials: Credentials | None = None) -> None:
        self._identity, self._credentials = identity, credentials
        self._session: aiohttp.ClientSession | None = None

    async def running(self, _: web.Application) -> AsyncIterator[None]:
        """While the server runs."""
        timeout = aiohttp.ClientTimeout(total=WITHIN_S, connect=CONNECT_WITHIN_S)
        async with aiohttp.ClientSession(timeout=timeout) as self._session:
            yield

    async def post(self, url: str, body: bytes) -> web.Response:
        """The leader's answer, as it is. Raises Unreachable."""
        assert self._session is not None
        try:
            headers = {FORWARDED: self._identity}
            tls: dict[str, Any] = {}
            if self._credentials is not None:
                # The leader is known by its pod's address, which no certificate names.
                tls = {"ssl": self._credentials.client, "server_hostname": SERVER_NAME}
            async with self._session.post(url, data=body, headers=headers, **tls) as answer:
                return web.Response(
                    status=answer.status,
                    body=await answer.read(),
                    content_type=answer.content_type,
                )
        except (aiohttp.ClientError, TimeoutError, OSError) as why:
            raise LeaderUnreachable(str(why) or "no answer in time") from None
