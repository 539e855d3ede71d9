"""The names of a workstation's service, and what the dashboard's page shows of its requests."""

import http.client
import re
import socket
from contextlib import closing

import pytest

from fenka.local.request_rates import SPAN_S, RequestRates
from fenka.views.board_sums import workload_line
from fenka.views.workloads import ServiceVersion, ServingPort
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


def listen_at_v6(port: int) -> socket.socket:
    """Listen where browsers look first for a name below `localhost`."""
    return socket.create_server(("::1", port), family=socket.AF_INET6)


def test_nobody_else_answers_under_the_name_of_a_service(service: Service) -> None:
    """Its supervisor holds the port at ::1, whether a dashboard runs or not. Each start has a new name."""
    service.serve("v1", "--wait")
    name = service.status()["page_host"]
    assert re.fullmatch(r"[0-9a-f]{32}\.localhost", name)
    assert status_for(service, f"{name}:{service.port}") == 200
    with pytest.raises(OSError, match="already in use"):
        listen_at_v6(service.port)
    service.station.ok("serve", "delete", "--local", service.name)
    listen_at_v6(service.port).close()
    service.serve("v1", "--wait")
    assert service.status()["page_host"] != name


def test_service_has_no_name_when_a_stranger_listens_under_it(service: Service) -> None:
    """A browser would ask the stranger first, so the page links to 127.0.0.1."""
    with listen_at_v6(service.port):
        service.serve("v1", "--wait")
        assert service.status()["page_host"] == ""
        service.answer()


@pytest.mark.parametrize(
    ("page_host", "link"),
    [("0a.localhost", "http://0a.localhost:8000"), ("", "http://127.0.0.1:8000")],
)
def test_page_links_a_service_by_its_name(page_host: str, link: str) -> None:
    """Without a name by its address."""
    version = ServiceVersion(
        *("chat", "alice", "1", "custom", "v1", 1, 1, 0.0),
        address="127.0.0.1",
        ports=(ServingPort("RESTFUL", 8000),),
        page_host=page_host,
    )
    assert workload_line(version, []).address == link


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
