"""The URL of a notebook's server, by the file that the server writes before it listens."""

import json
import os
import socket
from pathlib import Path
from typing import Any

import pytest

from fenka.jobs.notebook import url


def job_dir(tmp_path: Path, **written: Any) -> Path:
    """Return a job's directory with a file of a server, as jupyter-server 2.17 writes it."""
    server = {"url": "http://127.0.0.1:8888/", "hostname": "127.0.0.1", "port": 8888, "sock": ""}
    (tmp_path / "runtime").mkdir()
    (tmp_path / "runtime" / "jpserver-7.json").write_text(json.dumps(server | written))
    return tmp_path


def test_url_is_known_once_the_server_listens(tmp_path: Path) -> None:
    """Jupyter writes its file first, and listens later."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        port = server.getsockname()[1]
        job = job_dir(tmp_path, port=port, url=f"http://127.0.0.1:{port}/", token="abc")
        assert url(job) is None
        server.listen()
        assert url(job) == f"http://127.0.0.1:{port}/lab?token=abc"
    assert url(job) is None


def test_server_at_a_unix_socket_has_its_url(tmp_path: Path) -> None:
    """Jupyter's option `--sock`."""
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(tmp_path / "nb"))
        server.listen()
        job = job_dir(tmp_path, sock=str(tmp_path / "nb"), url="http+unix://nb/")
        assert url(job) == "http+unix://nb/lab"


def test_fifo_in_place_of_the_file_blocks_nothing(tmp_path: Path) -> None:
    """Programs of the notebook may put anything there."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        job = job_dir(tmp_path, port=port, url=f"http://127.0.0.1:{port}/")
        os.mkfifo(job / "runtime" / "jpserver-0.json")
        assert url(job) == f"http://127.0.0.1:{port}/lab"


@pytest.mark.parametrize(
    "written",
    [{"port": "many"}, {"port": 70000}, {"url": 1}, {"hostname": "\0"}, {"sock": "a\0b"}],
)
def test_file_that_names_no_server_is_ignored(tmp_path: Path, written: dict[str, Any]) -> None:
    """Whatever the job's own directory holds."""
    assert url(job_dir(tmp_path, **written)) is None
