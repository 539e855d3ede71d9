"""Reports pods that another program refuses: their binding, or the removal of fenka's scheduling gate."""

from collections.abc import Callable

from fenka.cluster.objects import Pod
from fenka.cluster.refusals import REFUSED, RefusedEntry
from fenka.kubernetes.api_client import ApiError
from fenka.scheduler.event_reporter import Recorder

_OWN = frozenset({401, 404, 409, 410, 429})
"""Answers that are about the caller, the moment, or an object that is gone."""


def is_foreign(why: ApiError) -> bool:
    """Return whether a program that checks requests has refused this one, or a right is missing.

    A webhook that does not answer refuses too, with 500. So does etcd where the pod is too large. Other
    errors of the server concern no pod.
    """
    if is_too_large(why):
        return True
    if why.status == 500:
        return "webhook" in str(why)
    return 400 <= why.status < 500 and why.status not in _OWN


def is_too_large(why: ApiError) -> bool:
    """Return whether etcd has not stored a pod because it would be larger than 1.5 MiB.

    Its author chooses how much room there is: each patch and the binding make a pod larger. The API server
    says so with 500, and with 409 of a binding.
    """
    return "request is too large" in str(why)


class RefusedPods:
    """Has the queue pause such pods, and posts an event on each of them at each pause."""

    def __init__(
        self,
        refuse: Callable[[Pod, str, str], RefusedEntry],
        recorder: Recorder,
        now: Callable[[], float],
    ) -> None:
        """Args:
        refuse: records a refusal of the pod, by what was refused and the API server's message.
        recorder: posts the events.
        now: seconds since 1970.
        """
        self._refuse, self._recorder, self._now = refuse, recorder, now

    def binding(self, pod: Pod, why: str) -> None:
        """Record that the pod's binding was refused."""
        self._record(pod, "its binding", why)

    def gate(self, pod: Pod, why: ApiError) -> None:
        """Record that the removal of fenka's gate from the pod was refused."""
        if is_foreign(why):
            self._record(pod, "the removal of its scheduling gate", str(why))

    def _record(self, pod: Pod, what: str, why: str) -> None:
        refusal, now = self._refuse(pod, what, why), self._now()
        if now < refusal.until:
            self._recorder.record_on_pod(pod, REFUSED, f"fenka: {refusal.sentence(now)}")
