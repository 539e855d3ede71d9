"""Decides which requests the dashboard answers, and what browsers may do with its answers.

Each fence stands alone. A page of another site cannot read the token, and its Origin is refused. A name that
was rebound to this machine is refused by its Host, and has no token either. There is no cookie, which
browsers would send to all ports of a host.

A server proves that it is the one that a page came from: it answers a challenge with its HMAC by the token.
So the page sends neither the token nor anything else to a program that has taken the port meanwhile.
"""

import hmac
import json
import re
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass
from urllib.parse import urlsplit

from aiohttp import web

MAX_BODY_BYTES = 64 << 10

PROOF = "proof"
"""The path below `api/` that proves who the server is. It needs no token, and tells nothing of it."""

PROOF_CONTEXT = "fenka dashboard "
"""Stands before each challenge, so that a proof is of no use elsewhere."""

_CHALLENGE = re.compile("[0-9a-f]{32,64}")

LOOPBACK_NAMES = frozenset({"127.0.0.1", "localhost", "::1"})

ANY_LOCALHOST = ".localhost"
"""Among the names of a server: all names that end so. No other machine's name can be one of them."""

HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src data:; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Permissions-Policy": "camera=(), geolocation=(), microphone=()",
}
"""On every answer."""

_READING = ("GET", "HEAD")

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class AnswerRefused(Exception):
    """The request gets no other answer. sentence: says why, and never repeats what the caller has sent."""

    def __init__(self, status: int, sentence: str) -> None:
        super().__init__(sentence)
        self.status, self.sentence = status, sentence


@dataclass(frozen=True, slots=True)
class Guard:
    """The rules of one server.

    Attributes:
        token: what callers of `api/` must have; empty where whoever reaches the server may look.
        hosts: names by which callers may reach the server.
        api: the path of all that needs the token.
    """

    token: str
    hosts: Collection[str]
    api: str = "/api/"

    def check(self, request: web.Request) -> None:
        """Raise AnswerRefused if the request is not from the page of somebody who has the token."""
        authority = request.headers.get("Host", "")
        if not self._is_called(_name(authority)):
            raise AnswerRefused(
                421,
                "this server is not called that: use the address that `fenka dashboard` printed, or "
                "start it with --host NAME",
            )
        origin = request.headers.get("Origin")
        if origin is not None and not _is_ours(origin, authority):
            raise AnswerRefused(403, "a page of another origin asked")
        if request.method not in (*_READING, "POST"):
            raise AnswerRefused(405, "this server answers GET and POST only")
        if request.method == "POST" and request.content_type != "application/json":
            raise AnswerRefused(415, "the body must be application/json")
        if self._needs_token(request.path) and not self._has_token(request):
            raise AnswerRefused(
                401,
                "the token is missing or of an earlier start: open the address that `fenka dashboard` "
                "prints",
            )

    def _is_called(self, name: str) -> bool:
        below_localhost = ANY_LOCALHOST in self.hosts and name.endswith(ANY_LOCALHOST)
        return name in self.hosts or below_localhost

    async def prove(self, request: web.Request) -> web.Response:
        """Answer a challenge. Raises AnswerRefused where there is no token, and for what is no challenge."""
        if not self.token:
            raise AnswerRefused(404, "this server has no token by which it could prove who it is")
        challenge = request.query.get("challenge", "")
        if not _CHALLENGE.fullmatch(challenge):
            raise AnswerRefused(400, "challenge has 32 to 64 hexadecimal digits")
        return web.json_response({"proof": proof(self.token, challenge)})

    def _needs_token(self, path: str) -> bool:
        return bool(self.token) and path.startswith(self.api) and path != f"{self.api}{PROOF}"

    def _has_token(self, request: web.Request) -> bool:
        scheme, _, given = request.headers.get("Authorization", "").partition(" ")
        given_bytes = given.strip().encode(errors="surrogateescape")
        # Both are compared in any case, in constant time.
        same = hmac.compare_digest(given_bytes, self.token.encode())
        return same and scheme.lower() == "bearer"

    @web.middleware
    async def middleware(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Answer what is refused, and what handlers refuse, with one sentence as JSON."""
        try:
            self.check(request)
            return await handler(request)
        except AnswerRefused as why:
            return problem(why.status, why.sentence)
        except web.HTTPRequestEntityTooLarge:
            return problem(413, f"the body has more than {MAX_BODY_BYTES >> 10} KiB")
        except web.HTTPNotFound:
            return problem(404, "there is nothing here")
        except web.HTTPMethodNotAllowed:
            return problem(405, "this cannot be done here")


def proof(token: str, challenge: str) -> str:
    """Return what only who has the token can say of a challenge."""
    return hmac.new(token.encode(), f"{PROOF_CONTEXT}{challenge}".encode(), "sha256").hexdigest()


async def add_headers(_: web.BaseRequest, response: web.StreamResponse) -> None:
    """Put the headers on an answer; for `on_response_prepare`."""
    response.headers.update(HEADERS)
    response.headers.setdefault("Cache-Control", "no-store")
    response.headers.pop("Server", None)


def problem(status: int, sentence: str) -> web.Response:
    """Return an answer that says what is wrong."""
    return web.Response(
        status=status, text=json.dumps({"problem": sentence}), content_type="application/json"
    )


def _name(authority: str) -> str:
    """Return the host of `HOST:PORT` or `[::1]:PORT` in lower case; empty for what is none."""
    try:
        parts = urlsplit(f"//{authority}")
        _ = parts.port  # Raises ValueError.
    except ValueError:
        return ""
    plain = not (parts.path or parts.query or parts.fragment or parts.username or parts.password)
    return (parts.hostname or "") if plain and "@" not in authority else ""


def _is_ours(origin: str, authority: str) -> bool:
    """Return whether an origin is this server, by the name and port by which the caller reaches it."""
    scheme, _, host = origin.partition("://")
    return scheme in ("http", "https") and host.lower() == authority.lower()
