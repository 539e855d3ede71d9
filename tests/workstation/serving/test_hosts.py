"""The names of a workstation's service, and what the dashboard's page shows of its requests."""

import http.client
from contextlib import closing

from fenka.local.request_rates import SPAN_S, RequestRates
from tests.workstation.conftest import eventually
from tests.workstation.serving.conftest import Service


def status_for(service: Service, host: str) -> int:
    """Return the status of a request with this Host field."""
    with closing(http.client.HTTPConnection("127.0.0.1", service.port, timeout=100)) as connection:
        connection.request("GET", "/", headers={"Host": host})
        return connection.getresponse().status


def test_service_refuses_the_names_of_web_pages(service: Service) -> None:
    """A page can lead its name to the loopback address, but the browser sends this name."""
    service.serve("v1", "--wait")
    own = f"{'0' * 32}.localhost:{service.port}"
    for host, status in ((own, 200), (f"localhost:{service.port}", 200), ("evil.example", 421)):
        assert status_for(service, host) == status


def test_service_for_other_machines_answers_to_all_names(service: Service) -> None:
    """They have names for this machine that it does not know."""
    service.serve("v1", "--wait", "--service", "NodePort")
    assert status_for(service, "gpu.lab.example") == 200


def test_requests_of_a_service_are_known(service: Service) -> None:
    """How many a second it answers, and how many wait."""
    service.serve("v1", "--wait")
    service.answer()
    eventually(lambda: service.status()["requests_per_s"].keys() == {"v1"})
    assert service.status()["waiting_requests"] == 0


def test_rate_is_the_mean_of_a_span() -> None:
    """It is not known before, nor without a gateway. One that starts again counts from 0."""
    rates = RequestRates()
    rates.on_report(0, {"v1": 10})
    rates.on_report(SPAN_S - 1, {"v1": 20})
    assert rates.per_s == {}
    rates.on_report(SPAN_S, {"v1": 30, "v2": 5})
    assert rates.per_s == {"v1": 20 / SPAN_S, "v2": 5 / SPAN_S}
    rates.on_report(2 * SPAN_S, {"v1": 1})
    assert rates.per_s == {"v1": 0}
    rates.on_report(2 * SPAN_S + 1, None)
    assert rates.per_s == {}
    rates.on_report(2 * SPAN_S + 2, {"v1": 1})
    assert rates.per_s == {}
