"""What Alibaba Cloud's RPC calls have in common: signatures, parameters and errors.

The parameters of each action come from the SDK's own request classes, so that a fake accepts what the cloud
documents and nothing else.
"""

import hashlib
import hmac
import inspect
import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache
from importlib import import_module
from typing import Any
from urllib.parse import quote

ALGORITHM = "ACS3-HMAC-SHA256"
CLOCK_SKEW_S = 900.0
_AUTHORIZATION = re.compile(
    rf"{ALGORITHM} Credential=(.+),SignedHeaders=(.+),Signature=([0-9a-f]+)"
)
_SIGNED = {
    "host",
    "x-acs-action",
    "x-acs-content-sha256",
    "x-acs-date",
    "x-acs-signature-nonce",
    "x-acs-version",
}


class CloudError(Exception):
    """A call is refused."""

    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(f"{code}: {message}")
        self.status, self.code, self.message = status, code, message


@dataclass(frozen=True, slots=True)
class Call:
    """An HTTP request. query: decoded. headers: with lower-case names."""

    method: str
    path: str
    query: Mapping[str, str]
    headers: Mapping[str, str]
    body: bytes


def check_signature(call: Call, secrets: Mapping[str, str], now: float) -> None:
    """Raise CloudError unless the call is signed with one of the secrets (by their key IDs), and recently."""
    match = _AUTHORIZATION.fullmatch(call.headers.get("authorization", ""))
    if match is None:
        raise CloudError(
            400, "IncompleteSignature", f"the header Authorization is not of {ALGORITHM}"
        )
    key, names, signature = match[1], match[2].split(";"), match[3]
    if key not in secrets:
        raise CloudError(404, "InvalidAccessKeyId.NotFound", "Specified access key is not found.")
    if missing := _SIGNED - set(names):
        raise CloudError(400, "IncompleteSignature", f"not signed: {', '.join(sorted(missing))}")
    if call.headers["x-acs-content-sha256"] != hashlib.sha256(call.body).hexdigest():
        raise CloudError(400, "InvalidContentSha256", "The body is not what was signed.")
    sent_at = datetime.strptime(call.headers["x-acs-date"], "%Y-%m-%dT%H:%M:%SZ").replace(
        tzinfo=UTC
    )
    if abs(sent_at.timestamp() - now) > CLOCK_SKEW_S:
        raise CloudError(400, "InvalidTimeStamp.Expired", "Specified time stamp is expired.")
    if not hmac.compare_digest(_sign(call, names, secrets[key]), signature):
        raise CloudError(400, "SignatureDoesNotMatch", "The signature is not that of the request.")


def _sign(call: Call, names: list[str], secret: str) -> str:
    query = "&".join(f"{name}={quote(call.query[name], safe='~')}" for name in sorted(call.query))
    headers = "".join(f"{name}:{call.headers.get(name, '').strip()}\n" for name in names)
    request = "\n".join(
        (
            call.method,
            call.path,
            query,
            headers,
            ";".join(names),
            call.headers["x-acs-content-sha256"],
        )
    )
    text = f"{ALGORITHM}\n{hashlib.sha256(request.encode()).hexdigest()}"
    return hmac.new(secret.encode(), text.encode(), hashlib.sha256).hexdigest()


@dataclass(frozen=True, slots=True)
class Field:
    """A parameter. model: of a nested one."""

    kind: str
    listed: bool
    model: type | None
    required: bool


def read_parameters(model: type, query: Mapping[str, str]) -> dict[str, Any]:
    """Return a call's parameters by their names, typed. Raise CloudError for unknown and missing ones."""
    tree: dict[str, Any] = {}
    for name, value in query.items():
        *path, last = name.split(".")
        level = tree
        for step in path:
            level = level.setdefault(step, {})
        level[last] = value
    return _read_model(model, tree, "")


def _read_model(model: type, tree: Any, above: str) -> dict[str, Any]:
    fields = _fields(model)
    if not isinstance(tree, dict):
        raise CloudError(400, "InvalidParameter", f"The parameter {above} is not valid.")
    for name in tree:
        if name not in fields:
            raise CloudError(
                400, "InvalidParameter", f"The parameter {above}{name} is not supported."
            )
    for name, field in fields.items():
        if field.required and not above and name not in tree:
            raise CloudError(400, f"Missing{name}", f"The parameter {name} is mandatory.")
    return {name: _read_field(fields[name], tree[name], above + name) for name in tree}


def _read_field(field: Field, tree: Any, name: str) -> Any:
    if not field.listed:
        return _read_value(field, tree, name)
    if not isinstance(tree, dict) or sorted(tree) != sorted(str(it + 1) for it in range(len(tree))):
        raise CloudError(400, f"Invalid{name}", f"The parameter {name} is no list.")
    return [_read_value(field, tree[str(it + 1)], f"{name}.{it + 1}") for it in range(len(tree))]


def _read_value(field: Field, tree: Any, name: str) -> Any:
    if field.model is not None:
        return _read_model(field.model, tree, f"{name}.")
    try:
        if field.kind == "bool":
            return {"true": True, "false": False}[tree.lower()]
        return {"str": str, "int": int, "float": float}[field.kind](tree)
    except (KeyError, ValueError, AttributeError):
        raise CloudError(400, f"Invalid{name}", f"The parameter {name} is not valid.") from None


@cache
def _fields(model: type) -> dict[str, Field]:
    """Read a request class: its annotations, its comments, and the names that it writes."""
    source = inspect.getsource(model)
    models = import_module(model.__module__.rpartition(".")[0])
    names = dict(re.findall(r"result\['(\w+)'\](?: = \[\]\n\s+if| = )\s*self\.(\w+)", source))
    wire = {attribute: name for name, attribute in names.items()}
    fields = {}
    for attribute, annotation in inspect.get_annotations(model.__init__).items():  # type: ignore[misc]
        match = re.fullmatch(r"(List\[)?(?:main_models\.)?(\w+)\]?", annotation)
        assert match is not None, annotation
        nested = None if match[2] in ("str", "int", "bool", "float") else getattr(models, match[2])
        required = re.search(rf"This parameter is required\.\n\s+self\.{attribute} = ", source)
        fields[wire[attribute]] = Field(
            match[2], match[1] is not None, nested, required is not None
        )
    return fields
