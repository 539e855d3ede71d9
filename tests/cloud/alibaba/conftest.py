"""A fake of Alibaba Cloud for each test."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cloud.alibaba.harness import EXACT, AlibabaCloud
from tests.cloud.alibaba.server import Server, serve_in_thread


@pytest.fixture
def cloud(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[AlibabaCloud]:
    """A fake without instances, whose groups are launched exactly."""
    monkeypatch.delenv("HTTP_PROXY", raising=False)
    monkeypatch.delenv("http_proxy", raising=False)
    server = Server(tmp_path / "cloud")
    cloud = AlibabaCloud(server.folder)
    with serve_in_thread(server) as address:
        cloud.address = address
        cloud.provider = cloud.open(EXACT)
        yield cloud
