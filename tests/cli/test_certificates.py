"""`fenka certificates`: Secrets in a namespace, and the files that a control plane needs."""

import os
import stat
from base64 import b64decode, b64encode
from collections.abc import Iterator
from pathlib import Path

import pytest
from aiohttp import web

from fenka.scheduler.leader_proxy import Credentials
from tests.cli.command import fenka
from tests.fakes.api_server import FakeApiServer, Json, in_thread

NAMESPACE = "gpu"


class Stand:
    """An API server that keeps Secrets; `command` is fenka's."""

    def __init__(self) -> None:
        self.server = FakeApiServer()
        self.kubeconfig = Path()

    def command(self, *arguments: str) -> str:
        """Return what `fenka certificates` prints. Raises AssertionError with its error."""
        options = ["-n", NAMESPACE, "--kubeconfig", str(self.kubeconfig)]
        done = fenka("certificates", *options, *arguments)
        assert done.exit_code == 0, done.stderr
        return done.stdout

    def secret(self, which: str) -> Json:
        """As the server has it."""
        return self.server.get("secrets", f"fenka-scheduler-{which}", NAMESPACE)

    def writes(self) -> int:
        """How many there were."""
        return sum(not it.startswith("GET") for it in self.server.requests)


@pytest.fixture
def stand(tmp_path: Path) -> Iterator[Stand]:
    """With no Secret."""
    it = Stand()
    with in_thread(it.server, tmp_path) as it.kubeconfig:
        yield it


def test_make_creates_only_missing_certificates(stand: Stand) -> None:
    """Run by each installation, each upgrade and every week."""
    said = stand.command("--make")
    assert [line.split()[1] for line in said.splitlines()] == [
        "fenka-scheduler-authority:",
        "fenka-scheduler-server:",
        "fenka-scheduler-client:",
    ]
    before = [stand.secret(it)["data"] for it in ("authority", "server", "client")]
    assert all(it["ca.crt"] == before[0]["tls.crt"] for it in before)
    writes = stand.writes()
    assert stand.command("--make") == "all certificates are valid\n"
    assert stand.writes() == writes
    stand.server.remove("secrets", "fenka-scheduler-server", NAMESPACE)
    assert "made fenka-scheduler-server" in stand.command("--make", "--host=10.1.2.3")
    assert stand.writes() == writes + 1
    assert stand.secret("client")["data"] == before[2]


def test_make_updates_a_secret_in_place_when_it_is_damaged(stand: Stand) -> None:
    """By its version: what others write meanwhile is looked at again."""
    stand.command("--make")
    stand.server.put("secrets", {**stand.secret("client"), "data": {"tls.crt": "?"}})
    conflicts = 1

    async def conflict(request: web.Request) -> web.StreamResponse | None:
        nonlocal conflicts
        if request.method == "PATCH" and conflicts:
            conflicts -= 1
            return web.json_response({"message": "modified"}, status=409)
        return None

    stand.server.before = conflict
    assert "made fenka-scheduler-client" in stand.command("--make")
    assert conflicts == 0
    assert b"BEGIN CERTIFICATE" in b64decode(stand.secret("client")["data"]["tls.crt"])


def test_write_creates_kube_schedulers_files_for_their_owner_only(
    stand: Stand, tmp_path: Path
) -> None:
    """They work together with the server's, and the key of the authority is none of them."""
    stand.command("--make")
    into = tmp_path / "new" / "fenka"
    said = stand.command("--into", str(into))
    assert "the certificate expires 20" in said
    assert sorted(os.listdir(into)) == ["ca.crt", "client.crt", "client.key"]
    assert stat.S_IMODE(into.stat().st_mode) == 0o700
    for path in into.iterdir():
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    # Again, over what is there.
    stand.command("--into", str(into))
    for file, key in (("server.crt", "tls.crt"), ("server.key", "tls.key")):
        (into / file).write_bytes(b64decode(stand.secret("server")["data"][key]))
    assert set(Credentials(into).expires_at) == {"ca", "server", "client"}


def test_certificates_fails_with_one_sentence_when_a_secret_is_missing(
    stand: Stand, tmp_path: Path
) -> None:
    """No Secret, half a Secret, a directory that cannot be."""
    with pytest.raises(AssertionError, match=r"Secret gpu/fenka-scheduler-client is not there"):
        stand.command("--into", str(tmp_path / "x"))
    assert [line.split()[-1] for line in stand.command().splitlines()[1:]] == ["missing"] * 3
    stand.command("--make")
    (tmp_path / "file").write_text("")
    with pytest.raises(AssertionError, match="cannot be written: Not a directory"):
        stand.command("--into", str(tmp_path / "file" / "x"))
    half = {**stand.secret("client"), "data": {"tls.crt": b64encode(b"x").decode()}}
    stand.server.put("secrets", half)
    with pytest.raises(AssertionError, match="is incomplete"):
        stand.command("--into", str(tmp_path / "x"))


def test_show_prints_purpose_and_expiry_of_each_certificate(stand: Stand) -> None:
    """Without cryptography, which only `--make` needs."""
    stand.command("--make")
    lines = stand.command().splitlines()
    assert lines[0].split() == ["SECRET", "FOR", "EXPIRES"]
    authority = stand.secret("authority")["metadata"]["annotations"]["fenka.io/expires"]
    assert lines[1].split() == [
        *("fenka-scheduler-authority", "signs", "the", "others"),
        authority,
    ]
    assert lines[2].startswith("fenka-scheduler-server     the extender's replicas")
    assert '"secret": "fenka-scheduler-client"' in stand.command("-o", "json")
