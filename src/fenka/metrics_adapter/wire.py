"""What the API serves: lists of values, its resources, and failures. Pure.

Wire facts: HorizontalPodAutoscalers request `/apis/external.metrics.k8s.io/v1beta1/namespaces/NS/METRIC`
with a labelSelector, sum the values of the list, and read them in thousandths. Without `/apis` and
`/openapi` the API server uses the list of resources.
"""

import math
import re
from datetime import datetime
from typing import Any

import msgspec

from fenka.core.errors import FenkaError

GROUP, VERSION = "external.metrics.k8s.io", "v1beta1"
GROUP_VERSION = f"{GROUP}/{VERSION}"
PATH = f"/apis/{GROUP_VERSION}"

REQUESTS, GPU_BUSY = "fenka_requests", "fenka_gpu_busy"

MAX_VALUE = 1e12
"""Larger values are refused: autoscalers compute with thousandths in 64 bits."""

NAMESPACE = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
METRIC = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]{0,199}")

BAD_REQUEST, FORBIDDEN, NOT_FOUND, INTERNAL, UNAVAILABLE = 400, 403, 404, 500, 503
_REASONS = {
    BAD_REQUEST: "BadRequest",
    FORBIDDEN: "Forbidden",
    NOT_FOUND: "NotFound",
    INTERNAL: "InternalError",
    UNAVAILABLE: "ServiceUnavailable",
}
_VERBS = ("get",)


class NoValue(FenkaError):
    """There is no value. code: HTTP's."""

    def __init__(self, sentence: str, code: int = UNAVAILABLE) -> None:
        super().__init__(sentence)
        self.code = code


def resource_list() -> bytes:
    """Return the APIResourceList. Gauges of pods are not in it: any name is one."""
    resources = [
        {
            "name": name,
            "singularName": "",
            "namespaced": True,
            "kind": "ExternalMetricValueList",
            "verbs": _VERBS,
        }
        for name in (REQUESTS, GPU_BUSY)
    ]
    body = {"groupVersion": GROUP_VERSION, "resources": resources}
    return _encoded("APIResourceList", "v1", body)


def value_list(metric: str, value: float, time: datetime) -> bytes:
    """Return the ExternalMetricValueList with one value. time: with its time zone."""
    item = {
        "metricName": metric,
        "metricLabels": {},
        "timestamp": f"{time:%Y-%m-%dT%H:%M:%SZ}",
        "value": quantity(value),
    }
    return _encoded("ExternalMetricValueList", GROUP_VERSION, {"metadata": {}, "items": [item]})


def failure(code: int, sentence: str) -> bytes:
    """Return the Status of a request that fails."""
    body = {
        "metadata": {},
        "status": "Failure",
        "message": sentence,
        "reason": _REASONS[code],
        "code": code,
    }
    return _encoded("Status", "v1", body)


def quantity(value: float) -> str:
    """Return a value as a quantity of Kubernetes, rounded up to thousandths."""
    # Without the difference 0.07 would become 71 thousandths.
    thousandths = max(math.ceil(value * 1000 - 1e-6), 0)
    whole, rest = divmod(thousandths, 1000)
    return f"{thousandths}m" if rest else str(whole)


def _encoded(kind: str, api_version: str, body: dict[str, Any]) -> bytes:
    return msgspec.json.encode({"kind": kind, "apiVersion": api_version, **body})
