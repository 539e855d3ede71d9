"""`fenka compose`: which words are Compose's own, which files it reads, and which services have a slice."""

from pathlib import Path
from typing import Any

import pytest

from fenka.cli.containers import compose
from fenka.cli.error_report import UserError

PROGRAM = ["docker", "compose"]


def test_options_are_compose_s_own_words() -> None:
    """A value is a word of its own, which all programs read."""
    options = compose.ComposeOptions(profile=["x", "y"], project_name="up", env_file=[""])
    words = "--file a.yaml --file b.yaml --project-name up --profile x --profile y"
    assert options.words(["a.yaml", "b.yaml"]) == words.split()


@pytest.mark.parametrize("verb", ["ps", "down", "x" * 100])
def test_other_verbs_are_compose_s_own(verb: str) -> None:
    """They make no container, so nobody needs to pay."""
    sentence = rf"knows up, create, run, scale, not {verb[:80]}: use `docker compose {verb[:80]}`"
    with pytest.raises(UserError, match=sentence):
        compose.compose([verb], compose.ComposeOptions(), "docker compose")


@pytest.mark.parametrize(
    ("present", "count"),
    [
        (["compose.yaml", "docker-compose.yml"], 1),
        (["docker-compose.yml", "docker-compose.override.yml"], 2),
        (["compose.yml", "compose.override.yaml", "docker-compose.override.yml"], 2),
    ],
)
def test_files_are_those_that_compose_finds(tmp_path: Path, present: list[str], count: int) -> None:
    """The first by its order, with the override of the same name; also from a folder below."""
    for name in present:
        (tmp_path / name).touch()
    below = tmp_path / "a" / "b"
    below.mkdir(parents=True)
    found = [Path(path).name for path in compose.found_files(str(below), {})]
    assert found == present[:count]


def test_environment_comes_before_what_is_found(tmp_path: Path) -> None:
    """As with Compose."""
    (tmp_path / "compose.yaml").touch()
    environment = {"COMPOSE_FILE": "a.yaml:b.yaml"}
    assert compose.found_files(str(tmp_path), environment) == ["a.yaml", "b.yaml"]
    separated = {"COMPOSE_FILE": "a;b", "COMPOSE_PATH_SEPARATOR": ";"}
    assert compose.found_files(str(tmp_path), separated) == ["a", "b"]


def test_file_that_names_other_files_gets_a_sentence(tmp_path: Path) -> None:
    """They would not be read, and other services started."""
    (tmp_path / "compose.yaml").touch()
    (tmp_path / ".env").write_text("A=1\nCOMPOSE_FILE=x.yaml\n")
    with pytest.raises(UserError, match=r"\.env sets COMPOSE_FILE: name its files with -f"):
        compose.found_files(str(tmp_path), {})


RESERVED = {"resources": {"reservations": {"devices": [{"device_ids": ["fenka.io/slice=any"]}]}}}


@pytest.mark.parametrize(
    ("service", "has_slice"),
    [
        ({"devices": ["fenka.io/slice=4"]}, True),
        ({"devices": [{"source": "fenka.io/card=1", "target": "fenka.io/card=1"}]}, True),
        ({"deploy": RESERVED}, True),
        ({"devices": ["/dev/fuse:/dev/fuse"], "deploy": {"replicas": 2}}, False),
        ({"environment": {"X": "fenka.io/slice=4"}}, False),
        (None, False),
        ("nonsense", False),
        ({"devices": {"a": 1}}, False),
    ],
)
def test_services_with_slices_are_found_by_their_devices(service: Any, has_slice: bool) -> None:
    """As Compose's `config` shows them: short, long, or as a reservation. Others get no ticket."""
    assert [*compose.with_slices({"services": {"a": service}})] == ["a"] * has_slice


def test_reservation_with_podman_compose_gets_a_sentence() -> None:
    """It would start the container without the device, and say nothing."""
    project = {"services": {"a": {"deploy": RESERVED}, "b": {"devices": ["fenka.io/slice=4"]}}}
    compose.check_program(PROGRAM, project, ["a", "b"])
    with pytest.raises(UserError, match="podman-compose starts a without its slice"):
        compose.check_program(["/usr/bin/podman-compose"], project, ["b", "a"])
