"""Credential plugins of kubeconfigs, against a server with TLS."""

import base64
import json
import sys
from pathlib import Path

import pytest

from fenka.cluster.objects import ApiStatus
from fenka.kubernetes.api_client import Api, ApiUnreachable
from fenka.server.certificate_files import CLIENT, CLIENT_NAME
from tests.kubernetes.tls_server import Json, ask, pairs, tls_server, write

pytestmark = pytest.mark.process

VERSION = "client.authentication.k8s.io/v1"

SCRIPT = """#!{python}
import json, os, pathlib
assert json.loads(os.environ["KUBERNETES_EXEC_INFO"])["kind"] == "ExecCredential"
runs = pathlib.Path({runs!r})
runs.write_text(runs.read_text() + "x" if runs.exists() else "x")
status = {status!r}
status = {{key: value.replace("RUN", str(len(runs.read_text()))) for key, value in status.items()}}
print(json.dumps({{"apiVersion": os.environ["VERSION"], "kind": "ExecCredential", "status": status}}))
"""


def plugin(folder: Path, status: dict[str, str], version: str = VERSION) -> Json:
    """Return a user whose plugin prints this status; RUN in it becomes the number of the run."""
    script = folder / "plugin"
    script.write_text(
        SCRIPT.format(python=sys.executable, runs=str(folder / "runs"), status=status)
    )
    script.chmod(0o755)
    return {
        "exec": {
            "apiVersion": VERSION,
            "command": "./plugin",
            "args": None,
            "env": [{"name": "VERSION", "value": version}],
            "interactiveMode": "IfAvailable",
        }
    }


@pytest.mark.parametrize(
    ("expiry", "headers"),
    [
        ("2100-01-01T00:00:00Z", ["Bearer 1", "Bearer 1"]),
        ("2020-01-01T00:00:00Z", ["Bearer 2", "Bearer 3"]),
    ],
)
async def test_plugin_runs_again_when_its_token_expires(
    expiry: str, headers: list[str], tmp_path: Path
) -> None:
    """It runs once to connect."""
    status = {"token": "RUN", "expirationTimestamp": expiry}
    async with tls_server(tmp_path) as server:
        config = write(tmp_path / "config", server.cluster, plugin(tmp_path, status))
        async with await Api.connect(config) as api:
            for _ in headers:
                await api.get("/api/v1/nodes/n", ApiStatus)
    assert [header for header, _ in server.asked] == headers


async def test_certificate_is_the_plugins_when_it_prints_one(tmp_path: Path) -> None:
    """In PEM, without base64."""
    client = pairs()[CLIENT]
    status = {
        "clientCertificateData": client.certificate.decode(),
        "clientKeyData": client.key.decode(),
    }
    async with tls_server(tmp_path) as server:
        await ask(write(tmp_path / "config", server.cluster, plugin(tmp_path, status)))
    assert server.asked == [("", CLIENT_NAME)]


async def test_plugin_learns_its_cluster_when_it_wants_to(tmp_path: Path) -> None:
    """With the authority's certificate, and the settings for plugins."""
    user = plugin(tmp_path, {})
    user["exec"] |= {
        "command": "sh",
        "args": [
            "-c",
            'printf %s "$KUBERNETES_EXEC_INFO" > "$1/info"; exec "$1/plugin"',
            "sh",
            str(tmp_path),
        ],
        "provideClusterInfo": True,
    }
    settings = {"name": "client.authentication.k8s.io/exec", "extension": {"audience": "a"}}
    async with tls_server(tmp_path) as server:
        cluster = server.cluster | {"extensions": [settings]}
        await ask(write(tmp_path / "config", cluster, user))
    info = json.loads((tmp_path / "info").read_text())["spec"]["cluster"]
    assert info["server"] == server.cluster["server"]
    assert "BEGIN CERTIFICATE" in base64.b64decode(info["certificate-authority-data"]).decode()
    assert info["config"] == {"audience": "a"}


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"command": "no-such-plugin"}, "No such file or directory: 'no-such-plugin'"),
        ({"command": "false"}, "the credential plugin false failed: exit code 1"),
        (
            {"command": "sh", "args": ["-c", "echo log in first >&2; exit 3"]},
            "the credential plugin sh failed: log in first",
        ),
        ({"command": "echo"}, "the credential plugin echo printed no ExecCredential: "),
        (
            {"env": [{"name": "VERSION", "value": "v0"}]},
            f"printed v0, not {VERSION}",
        ),
    ],
)
async def test_connection_fails_when_a_plugin_does(
    changes: Json, sentence: str, tmp_path: Path
) -> None:
    """The sentence says what the plugin said."""
    user = plugin(tmp_path, {"token": "t"})
    user["exec"] |= changes
    with pytest.raises(ApiUnreachable) as refused:
        await Api.connect(write(tmp_path / "config", {"server": "https://k.invalid"}, user))
    assert sentence in str(refused.value)
