"""Kubeconfigs and service accounts, against a server with TLS."""

import base64
import ssl
from pathlib import Path
from typing import Any

import pytest

from fenka.cluster.objects import ApiStatus
from fenka.kubernetes import kube_config
from fenka.kubernetes.api_client import Api, ApiUnreachable
from fenka.server.certificate_files import AUTHORITY, CLIENT, CLIENT_NAME
from tests.kubernetes.tls_server import Json, ask, pairs, plain_pairs, tls_server, write


def in_base64(data: bytes) -> str:
    """As a kubeconfig contains it."""
    return base64.b64encode(data).decode()


@pytest.mark.parametrize(
    ("context", "namespace"), [(None, "team"), ("other", "default"), ("none", "default")]
)
def test_namespace_is_the_contexts(
    context: str | None, namespace: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of all files that $KUBECONFIG names, in their order."""
    contexts = [
        {"name": "mine", "context": {"cluster": "k", "namespace": "team"}},
        {"name": "other", "context": {"cluster": "k"}},
    ]
    named = {"contexts": contexts, "current-context": "mine"}
    file = write(tmp_path / "config", {"server": "https://k.invalid"}, None, **named)
    monkeypatch.setenv("KUBECONFIG", f"{tmp_path}/none:{file}")
    assert kube_config.namespace(None, context) == namespace


@pytest.mark.parametrize(
    ("user", "header"),
    [
        ({"token": "secret"}, "Bearer secret"),
        ({"tokenFile": "token"}, "Bearer of-the-file"),
        ({"username": "ann", "password": "pw"}, "Basic YW5uOnB3"),
        ({"token": None, "exec": None, "extensions": [{"name": "n"}]}, ""),
        (None, ""),
    ],
)
async def test_header_is_the_users_when_the_kubeconfig_has_one(
    user: Json | None, header: str, tmp_path: Path
) -> None:
    """Nulls count as left out, and unknown keys are other programs'."""
    (tmp_path / "token").write_text("of-the-file\n")
    async with tls_server(tmp_path) as server:
        await ask(write(tmp_path / "config", server.cluster, user))
    assert server.asked == [(header, "")]


async def test_certificates_are_used_when_files_are_named_relative_to_the_kubeconfig(
    tmp_path: Path,
) -> None:
    """Wherever the command runs."""
    user = {"client-certificate": f"{CLIENT}.crt", "client-key": f"{CLIENT}.key"}
    async with tls_server(tmp_path) as server:
        cluster = server.cluster | {"certificate-authority": "ca.crt"}
        await ask(write(tmp_path / "config", cluster, user))
    assert server.asked == [("", CLIENT_NAME)]


async def test_certificates_are_used_when_the_kubeconfig_contains_them(tmp_path: Path) -> None:
    """They precede files. No copy of the key stays on disk."""
    certificate, key = pairs()[CLIENT].certificate, pairs()[CLIENT].key
    user = {
        "client-certificate-data": in_base64(certificate),
        "client-key-data": in_base64(key),
        "client-key": "away",
    }
    authority = {"certificate-authority-data": in_base64(pairs()[AUTHORITY].certificate)}
    async with tls_server(tmp_path) as server:
        await ask(write(tmp_path / "config", server.cluster | authority, user))
    assert server.asked == [("", CLIENT_NAME)]


async def test_authority_without_extensions_is_trusted_as_kubectl_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From Python 3.13 on default contexts refuse them."""
    default = ssl.create_default_context

    def strict(*args: Any, **options: Any) -> ssl.SSLContext:
        context = default(*args, **options)
        context.verify_flags |= ssl.VERIFY_X509_STRICT
        return context

    async with tls_server(tmp_path, plain_pairs()) as server:
        monkeypatch.setattr(ssl, "create_default_context", strict)
        await ask(write(tmp_path / "config", server.cluster, {"token": "secret"}))
    assert server.asked == [("Bearer secret", "")]


async def test_server_is_not_verified_when_the_kubeconfig_says_so(tmp_path: Path) -> None:
    """Otherwise its authority must be known."""
    async with tls_server(tmp_path) as server:
        cluster = {"server": server.cluster["server"]}
        with pytest.raises(ApiUnreachable, match="certificate"):
            await ask(write(tmp_path / "config", cluster, None))
        cluster["insecure-skip-tls-verify"] = True
        await ask(write(tmp_path / "config", cluster, None))
    assert len(server.asked) == 1


async def test_first_entry_is_used_when_several_files_have_the_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As kubectl does, also for the current context. Files that do not exist are left out."""
    async with tls_server(tmp_path) as server:
        first = write(tmp_path / "first", server.cluster, {"token": "first"})
        contexts = [{"name": "d", "context": {"cluster": "k", "user": "v"}}]
        second = write(
            tmp_path / "second",
            {"server": "https://away.invalid"},
            None,
            contexts=contexts,
            users=[{"name": "v", "user": {"token": "second"}}],
            **{"current-context": "d"},
        )
        monkeypatch.setenv("KUBECONFIG", f"{tmp_path}/none::{first}:{second}")
        await ask(None)
        await ask(None, "d")
    assert server.asked == [("Bearer first", ""), ("Bearer second", "")]


async def test_token_is_read_again_when_the_pod_has_a_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The service account of a pod counts where $KUBECONFIG names no file that exists."""
    monkeypatch.setattr(kube_config, "ACCOUNT", tmp_path)
    monkeypatch.setattr(kube_config, "_REREAD_S", 0.0)
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    token = tmp_path / "token"
    token.write_text("old")
    async with tls_server(tmp_path) as server:
        monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "127.0.0.1")
        monkeypatch.setenv("KUBERNETES_SERVICE_PORT", str(server.port))
        found = await kube_config.api_server()
        assert found.tls is not None
        found.tls.check_hostname = False
        async with Api(found) as api:
            await api.get("/api/v1/nodes/n", ApiStatus)
            token.write_text("new")
            await api.get("/api/v1/nodes/n", ApiStatus)
            token.write_text("")
            with pytest.raises(ApiUnreachable, match="token is empty"):
                await api.get("/api/v1/nodes/n", ApiStatus)
    assert [header for header, _ in server.asked] == ["Bearer old", "Bearer new"]


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"current-context": ""}, "no current-context is set: name a context by --context"),
        ({"current-context": "cc"}, "there is no context cc: did you mean c?"),
        ({"clusters": None}, "there is no cluster k"),
        ({"users": []}, "there is no user u"),
        ({"clusters": [{"name": "k", "cluster": {}}]}, "cluster k has no server"),
        ({"users": [{"name": "u", "user": {"token": 7}}]}, "users[0].user.token must be a text"),
        (
            {"users": [{"name": "u", "user": {"client-certificate": "none.crt"}}]},
            "No such file or directory: '{folder}/none.crt'",
        ),
        (
            {"users": [{"name": "u", "user": {"client-certificate-data": "x"}}]},
            "client-certificate-data is not in base64",
        ),
        (
            {"users": [{"name": "u", "user": {"auth-provider": {"name": "gcp"}}}]},
            "user u has an auth-provider, which is not supported: use an exec plugin",
        ),
    ],
)
async def test_kubeconfig_is_refused_when_something_is_wrong(
    changes: Json, sentence: str, tmp_path: Path
) -> None:
    """The sentence names the file and what is wrong."""
    given: dict[str, Any] = changes
    path = write(tmp_path / "config", {"server": "https://k.invalid"}, {"token": "t"}, **given)
    with pytest.raises(ApiUnreachable) as refused:
        await Api.connect(path)
    assert str(refused.value).startswith(f"no cluster can be reached by {path}: ")
    assert sentence.format(folder=tmp_path) in str(refused.value)


async def test_file_is_named_when_it_does_not_exist(tmp_path: Path) -> None:
    """With the ways to name another one."""
    with pytest.raises(ApiUnreachable, match=r"none: there is no such file: name one by --kube"):
        await Api.connect(tmp_path / "none")
