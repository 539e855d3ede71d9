"""Reports refusals by fenka's own admission policies: the chart and the program do not fit then.

The policies are in deploy/chart/templates/own-accounts.yaml. They admit what fenka's programs write, so a
refusal means that the chart is of another release, or that somebody has changed the policy.
"""

import logging
import re
import time
from collections.abc import Callable

_LOG = logging.getLogger(__name__)

_OWN = re.compile(
    r"[^']*ValidatingAdmissionPolicy '[^']*' with binding '[^']*' denied request: "
    r"(?:system:serviceaccount:\S+ may not write "
    r"|the scheduler may write only the records of a pod's card "
    r"|the node program of \S+ may write only its own node and pods"
    r"|this token of the node program names no node)"
)
"""The API server's sentence with the messages of the policies.

It is matched from its beginning: another program's policy may repeat what a tenant has written.
"""

REPEATED_S = 60.0
"""The same refusal is written to the log at most this often."""

MAX_TEXT = 400
"""Characters of a refusal that are logged."""

_MAX_KNOWN = 20
"""Different refusals that are logged in REPEATED_S. Parts of a sentence may be what a tenant has written."""


def is_own(status: int, message: str) -> bool:
    """Return whether a policy of fenka's chart has refused a request, by the API server's answer."""
    return status in (403, 422) and _OWN.match(message) is not None


class OwnRefusals:
    """Logs refusals by fenka's own policies, each at most once in REPEATED_S."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """Args: clock: seconds, monotonic."""
        self._clock = clock
        self._logged: dict[str, float] = {}

    def heard(self, status: int, message: str) -> None:
        """Log the answer as an error if it is a refusal by a policy of fenka's chart."""
        if not is_own(status, message):
            return
        # The first part of a message names an object; the policy's own sentence does not.
        begin, now = message.index("ValidatingAdmissionPolicy"), self._clock()
        sentence = message[begin : begin + MAX_TEXT]
        self._logged = {text: at for text, at in self._logged.items() if now - at < REPEATED_S}
        if sentence in self._logged or len(self._logged) >= _MAX_KNOWN:
            return
        self._logged[sentence] = now
        _LOG.error(
            "an admission policy of fenka's own chart refuses what this program writes: %s; the chart and "
            "the program are of different releases, or the policy was changed: run helm upgrade with the "
            "chart of this release",
            message[:MAX_TEXT],
        )
