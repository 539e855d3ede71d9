"""Sockets of JupyterHub's servers: root connects to what their user listens on, and to nothing else."""

import os
import socket
from pathlib import Path

import pytest

from fenka.workstation.hub_sockets import HubSocket
from fenka.workstation.paths import UnsafeDirectory


@pytest.fixture
def place(tmp_path: Path) -> HubSocket:
    """A prepared socket of this user."""
    place = HubSocket(tmp_path / "hub", os.geteuid(), "name")
    place.prepare()
    return place


def listener(path: Path) -> socket.socket:
    """Return a socket that listens."""
    server = socket.socket(socket.AF_UNIX)
    server.bind(str(path))
    server.listen()
    return server


def test_link_leads_to_the_server_when_it_listens(place: HubSocket) -> None:
    """Before that there is none, and after the removal, too."""
    assert not place.publish()
    with listener(place.path) as server, socket.socket(socket.AF_UNIX) as client:
        assert place.publish()
        server.accept()[0].close()  # The look at who listens.
        client.connect(str(place.link))
        server.accept()[0].close()
    place.remove()
    assert not place.link.exists()
    assert place.path.parent.stat().st_mode & 0o777 == 0o700
    assert place.link.parent.stat().st_mode & 0o777 == 0o700


def test_link_stays_with_the_socket_when_the_name_leads_elsewhere(place: HubSocket) -> None:
    """What the user changes later changes nothing for root."""
    with listener(place.path), listener(place.directory / "other"):
        assert place.publish()
        inode = place.link.stat().st_ino
        place.path.unlink()
        place.path.symlink_to(place.directory / "other")
        assert place.link.stat().st_ino == inode
        assert not place.publish()


@pytest.mark.parametrize("kind", ["link", "pipe", "file", "directory", "ended", "none"])
def test_nothing_is_published_that_is_no_listening_socket(place: HubSocket, kind: str) -> None:
    """None of them blocks, and none leaves a name."""
    with listener(place.directory / "other"):
        match kind:
            case "link":
                place.path.symlink_to(place.directory / "other")
            case "pipe":
                os.mkfifo(place.path)
            case "file":
                place.path.touch()
            case "directory":
                place.path.mkdir()
            case "ended":
                listener(place.path).close()
        assert not place.publish()
    assert list(place.link.parent.iterdir()) == []


@pytest.mark.skipif(os.geteuid() != 0, reason="another user's socket takes root")
def test_socket_of_another_user_is_not_published(tmp_path: Path) -> None:
    """As one that only root may connect to, under a name of the server's."""
    place = HubSocket(tmp_path, 61001, "name")
    place.prepare()
    with listener(place.path):
        assert not place.publish()
        os.chown(place.path, 61001, -1)
        assert not place.publish(), "it is root's program that listens"


def test_directory_is_refused_when_others_can_write_there(tmp_path: Path) -> None:
    """They could replace what is in it."""
    for path, mode in ((tmp_path / "a", 0o775), (tmp_path / "b", 0o757)):
        path.mkdir()
        path.chmod(mode)
        with pytest.raises(UnsafeDirectory, match="nobody else can write: change it"):
            HubSocket(path, os.geteuid(), "name").prepare()
    (tmp_path / "c").symlink_to(tmp_path)
    with pytest.raises(UnsafeDirectory):
        HubSocket(tmp_path / "c", os.geteuid(), "name").prepare()
    with pytest.raises(UnsafeDirectory, match="longer than 107 bytes"):
        HubSocket(tmp_path / ("d" * 100), os.geteuid(), "name").prepare()
