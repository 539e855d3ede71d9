"""Finds out who looks at a cluster's page, and which namespaces they may see: by the API server's judgement.

A token is what the API server says that it is (TokenReview). A user behind a proxy is who that says, if it
knows the secret. Either sees the namespaces in which they may list pods (SubjectAccessReview), and is refused
without any: every pod has a token. Answers count for half a minute, so a right that is withdrawn ends after
that.
"""

import asyncio
import hashlib
import hmac
import time
from collections.abc import Awaitable, Callable, Collection, Hashable, Mapping
from dataclasses import dataclass
from typing import Protocol, TypeVar

import msgspec
from aiohttp import web

from fenka.dashboard.guard import AnswerRefused
from fenka.kubernetes.api_client import Api, ApiError, ApiUnreachable

T = TypeVar("T")

KEPT_S = 30.0
"""For which an answer of the API server counts."""

MAX_KEPT = 20_000
"""Answers. Beyond that all are asked for again."""

TOGETHER = 8
"""Questions to the API server at a time: whoever sends tokens that are none must not keep it busy."""

MAX_NAME = 1024

USER, GROUPS, SECRET = "X-Forwarded-User", "X-Forwarded-Groups", "X-Fenka-Proxy-Secret"
"""Fields of a proxy's requests. The last one has the secret that only the proxy and this server know."""

OWN_NAMES = "system:"
"""The beginning of Kubernetes' own users and groups. No proxy may name them."""

_ACCOUNT = "system:serviceaccount:"
"""The beginning of a ServiceAccount's name, before its namespace."""

MAX_ELSEWHERE = 200
"""Namespaces beyond those that are shown, of which the API server is asked about a viewer."""

NOWHERE = (
    "this page is for those who may list pods in a namespace, and you may in none that has any"
)

PASTE = "paste a token of this cluster, as `kubectl create token NAME` prints one"


@dataclass(frozen=True, slots=True)
class SignedInViewer:
    """The user of a request.

    Attributes:
        name: Of the user; empty where whoever reaches the server may look.
        namespaces: Those that they may see; None for all.
        token: Of the API server, by which they change things; empty: they only look.
    """

    name: str = ""
    namespaces: frozenset[str] | None = None
    token: str = ""

    @property
    def person(self) -> str:
        """Return the name by which streams are counted: a user, or that of a namespace's ServiceAccounts.

        A tenant makes any number of ServiceAccounts.
        """
        if not self.name.startswith(_ACCOUNT):
            return self.name
        return self.name.rpartition(":")[0]


EVERYBODY = SignedInViewer()


@dataclass(frozen=True, slots=True)
class Namespaces:
    """Namespaces of the cluster.

    Attributes:
        shown: Those of what the page shows.
        of_pods: Those of all pods.
    """

    shown: Collection[str] = ()
    of_pods: Collection[str] = ()


class OpenSignIn:
    """Everybody who reaches the server may look at everything."""

    acts = False

    async def viewer(self, request: web.Request, namespaces: Namespaces) -> SignedInViewer:  # noqa: ARG002
        """Return the viewer whom nobody knows."""
        return EVERYBODY


class SignIn(Protocol):
    """Says who sent a request."""

    @property
    def acts(self) -> bool:
        """Return whether viewers may change things, with their own rights."""

    async def viewer(self, request: web.Request, namespaces: Namespaces) -> SignedInViewer:
        """Return who sent a request, and which of the shown namespaces they may see. Raises AnswerRefused."""


class _ReviewedUser(msgspec.Struct, frozen=True):
    """A user as the API server describes them."""

    username: str = ""
    uid: str = ""
    groups: tuple[str, ...] = ()
    extra: Mapping[str, tuple[str, ...]] = {}


class _TokenStatus(msgspec.Struct, frozen=True):
    authenticated: bool = False
    user: _ReviewedUser = _ReviewedUser()


class _TokenReview(msgspec.Struct, frozen=True):
    status: _TokenStatus = _TokenStatus()


class _AccessStatus(msgspec.Struct, frozen=True):
    allowed: bool = False


class _AccessReview(msgspec.Struct, frozen=True):
    status: _AccessStatus = _AccessStatus()


class _Reviews:
    """Asks the API server, and keeps its answers for a while."""

    def __init__(self, api: Api, clock: Callable[[], float]) -> None:
        self._api, self._clock = api, clock
        self._kept: dict[Hashable, tuple[float, object]] = {}
        self._slots = asyncio.Semaphore(TOGETHER)

    async def user_of(self, token: str) -> _ReviewedUser | None:
        """Return whose token it is; None if it is none. Raises AnswerRefused."""
        body = {
            "apiVersion": "authentication.k8s.io/v1",
            "kind": "TokenReview",
            "spec": {"token": token},
        }
        # No token is kept, only what tells it from others.
        key = "token", hashlib.sha256(token.encode(errors="surrogateescape")).digest()

        async def ask() -> _ReviewedUser | None:
            path = "/apis/authentication.k8s.io/v1/tokenreviews"
            status = (await self._api.create(path, _TokenReview, body)).status
            return status.user if status.authenticated and status.user.username else None

        return await self._answer(key, ask)

    async def visible(
        self, user: _ReviewedUser, namespaces: Namespaces, refusal: int
    ) -> frozenset[str] | None:
        """Return the shown namespaces in which a user may list pods; None for all.

        Args:
            user: Who looks.
            namespaces: Of the cluster.
            refusal: The status of the answer to a user who may list pods nowhere.

        Raises:
            AnswerRefused: They may list pods nowhere, or the API server does not say.
        """
        if await self._may_list(user, ""):
            return None
        allowed = await self._where(user, namespaces.shown)
        if not allowed and namespaces.of_pods:
            # Somebody whose namespaces have no cards yet may look.
            others = [*sorted(namespaces.of_pods)[:MAX_ELSEWHERE]]
            if user.username.startswith(_ACCOUNT):
                others = [user.username.split(":")[2]]
            if not await self._where(user, others):
                raise AnswerRefused(refusal, NOWHERE)
        return allowed

    async def _where(self, user: _ReviewedUser, names: Collection[str]) -> frozenset[str]:
        allowed = await asyncio.gather(*(self._may_list(user, name) for name in names))
        return frozenset(name for name, may in zip(names, allowed, strict=True) if may)

    async def _may_list(self, user: _ReviewedUser, namespace: str) -> bool:
        spec = {
            "user": user.username,
            "uid": user.uid,
            "groups": user.groups,
            "extra": user.extra,
            "resourceAttributes": {"namespace": namespace, "verb": "list", "resource": "pods"},
        }
        body = {
            "apiVersion": "authorization.k8s.io/v1",
            "kind": "SubjectAccessReview",
            "spec": spec,
        }

        async def ask() -> bool:
            path = "/apis/authorization.k8s.io/v1/subjectaccessreviews"
            return (await self._api.create(path, _AccessReview, body)).status.allowed

        return await self._answer(("list", namespace, msgspec.json.encode(user)), ask)

    async def _answer(self, key: Hashable, ask: Callable[[], Awaitable[T]]) -> T:
        expires, kept = self._kept.get(key, (0.0, None))
        if self._clock() < expires:
            return kept  # type: ignore[return-value]
        try:
            async with self._slots:
                answer = await ask()
        except (ApiError, ApiUnreachable) as why:
            # Its sentence may repeat the token.
            kind = why.reason if isinstance(why, ApiError) else "it does not answer"
            raise AnswerRefused(503, f"the API server did not say who you are: {kind}") from None
        if len(self._kept) >= MAX_KEPT:
            self._kept.clear()
        self._kept[key] = self._clock() + KEPT_S, answer
        return answer


class TokenSignIn:
    """Viewers send a token of the cluster: of a ServiceAccount or of its OIDC provider."""

    acts = True

    def __init__(self, api: Api, clock: Callable[[], float] = time.monotonic) -> None:
        """Args: api: with the right to create TokenReviews and SubjectAccessReviews. clock: seconds."""
        self._reviews = _Reviews(api, clock)

    async def viewer(self, request: web.Request, namespaces: Namespaces) -> SignedInViewer:
        """Return whose token a request has. Raises AnswerRefused."""
        fields = request.headers.getall("Authorization", [])
        scheme, _, token = fields[0].partition(" ") if len(fields) == 1 else ("", "", "")
        token = token.strip()
        if scheme.lower() != "bearer" or not token or not token.isascii():
            raise AnswerRefused(401, PASTE)
        user = await self._reviews.user_of(token)
        if user is None:
            raise AnswerRefused(401, f"the API server does not accept this token: {PASTE}")
        # 401 has the page ask for another token.
        visible = await self._reviews.visible(user, namespaces, 401)
        return SignedInViewer(user.username, visible, token)


class ProxySignIn:
    """A proxy in front of the server says who looks, and proves by a secret that it is the proxy."""

    acts = False

    def __init__(self, api: Api, secret: str, clock: Callable[[], float] = time.monotonic) -> None:
        """Args: api: with the right to create SubjectAccessReviews. clock: seconds."""
        self._reviews, self._secret = _Reviews(api, clock), secret

    async def viewer(self, request: web.Request, namespaces: Namespaces) -> SignedInViewer:
        """Return who looks, as the proxy says. Raises AnswerRefused."""
        given = request.headers.getall(SECRET, [])
        known = len(given) == 1 and hmac.compare_digest(
            given[0].encode(errors="surrogateescape"), self._secret.encode()
        )
        if not known:
            raise AnswerRefused(401, "this page is reached by way of its proxy only")
        users = request.headers.getall(USER, [])
        if len(users) != 1 or not _is_name(users[0]):
            raise AnswerRefused(401, f"the proxy must say in {USER} who looks, once")
        lists = request.headers.getall(GROUPS, [])
        groups = [name.strip() for text in lists for name in text.split(",") if name.strip()]
        if not all(map(_is_name, groups)):
            raise AnswerRefused(403, f"the proxy must not name Kubernetes' own groups in {GROUPS}")
        user = _ReviewedUser(users[0].strip(), groups=(*groups, "system:authenticated"))
        return SignedInViewer(user.username, await self._reviews.visible(user, namespaces, 403))


def _is_name(text: str) -> bool:
    """Return whether this can be a user or a group that is not Kubernetes' own."""
    name = text.strip()
    return 0 < len(name) <= MAX_NAME and name.isprintable() and not name.startswith(OWN_NAMES)
