"""A tab of JupyterLab outlives its notebook's server, and another program takes the port.

What the tab sends is of no use to that program: its login ends with the server, as does its name.
"""

import http.client
import os
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from playwright.sync_api import expect

from tests.ports import free_port
from tests.waiting import wait_until
from tests.web.browser import Watched
from tests.web.test_port_changes_hands import LOGIN, stranger_at
from tests.workstation.conftest import Workstation, workstation_at


@pytest.fixture
def station() -> Iterator[Workstation]:
    """A workstation with one T4, and the Jupyter that came with fenka."""
    with workstation_at([]) as station:
        station.environment["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        station.start("--simulate", "T4")
        yield station


def status(place: str, fields: dict[str, str]) -> int:
    """Return the status of an answer that only who is logged in gets."""
    port = urlsplit(f"http://{place}").port or 0
    with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=60)) as server:
        server.request("GET", "/api/contents", headers={"Host": place} | fields)
        return server.getresponse().status


@pytest.mark.parametrize("password", ["", "mypassw0rd"], ids=["token", "password"])
def test_stranger_gets_no_login_that_is_good_for_anything(
    station: Workstation, watched: Watched, password: str
) -> None:
    """Neither for another server of this machine, nor for the same notebook when it is started again."""
    watched.expected += [""]  # The tab complains about its server's end.
    page, port = watched.page, free_port()
    if password:
        station.environment["PASSWORD"] = password
    given = ("--gpu-mem", "2", "--name", "nb", "--port", str(port), "--detach")
    url = station.ok("notebook", *given).removeprefix("nb: ").strip()
    page.context.add_cookies([{"name": "login", "value": LOGIN, "url": "http://127.0.0.1/"}])
    page.clock.install()
    page.goto(url)
    if password:
        page.get_by_label("Password").fill(password)
        page.get_by_role("button", name="Log in").click()
    expect(page.locator("#jp-main-dock-panel")).to_be_visible()
    fields = {"Cookie": "; ".join(f"{c['name']}={c['value']}" for c in page.context.cookies(url))}
    assert status(urlsplit(url).netloc, fields) == 200
    station.ok("stop", "nb")
    with stranger_at(port) as stranger:

        def is_asked() -> bool:
            page.clock.run_for(60_000)
            return bool(stranger.asked)

        wait_until(is_asked)
        page.clock.run_for(180_000)
        page.evaluate("fetch('/the-test-itself').then(() => null)")
        asked = [fields for _, fields in stranger.asked]
    assert LOGIN not in str(asked)
    assert {sent["Host"] for sent in asked} == {urlsplit(url).netloc}
    again = station.ok("start", "nb", "--detach").removeprefix("nb: ").strip()
    assert urlsplit(again).netloc != urlsplit(url).netloc
    stolen: list[dict[str, str]] = [
        {name: sent[name] for name in ("Cookie", "Authorization") if name in sent} for sent in asked
    ]
    for fields in stolen:
        assert status(urlsplit(again).netloc, fields) in (302, 403)
        assert status(urlsplit(url).netloc, fields) == 421
