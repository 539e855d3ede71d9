"""The file with the daemon's options."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from fenka.workstation import main, paths
from fenka.workstation.files import DaemonConfig, save_config
from fenka.workstation.main import InvalidOption
from fenka.workstation.paths import Runtime
from tests.workstation.conftest import Workstation, refused


@pytest.fixture
def write(station: Workstation) -> Callable[[str], Path]:
    """Return a function that writes the file of the workstation's user."""
    directory = station.root / "config"
    (directory / "fenka").mkdir(parents=True)
    station.environment["XDG_CONFIG_HOME"] = str(directory)

    def write(text: str) -> Path:
        path = directory / "fenka" / "daemon.toml"
        path.write_text(text)
        return path

    return write


def test_options_outlive_the_daemon(station: Workstation, write: Callable[[str], Path]) -> None:
    """A daemon that a command starts has the file's options, and after --stop again."""
    write('simulate = "T4*2"\nonly = [1]\nunit = "MiB"\n')
    for _ in range(2):
        station.ok("run", "--gpu-mem", "512", "--", "true")
        nodes = json.loads(station.ok("top", "node", "--local", "-o", "json"))
        assert "512" not in str(nodes)
        assert station.ok("doctor").count("Tesla T4") == 1
        station.ok("daemon", "--stop")


def test_command_line_has_precedence_over_the_file(
    station: Workstation, write: Callable[[str], Path]
) -> None:
    """Also with the default's value."""
    path = write('simulate = "T4"\nunit = "MiB"\n')
    shown = station.ok("daemon", "--show-config", "--unit", "GiB").splitlines()
    assert f'simulate = "T4"  # {path}' in shown
    assert 'unit = "GiB"  # the command line' in shown
    assert 'policy = "binpack"  # default' in shown
    station.start("--unit", "GiB")
    assert '# the running daemon has unit = "GiB"' in station.ok("daemon", "--show-config")


def test_each_mistake_has_a_sentence(station: Workstation, write: Callable[[str], Path]) -> None:
    """The daemon does not start, and starts nothing, before all are mended."""
    path = write(
        'simulat = "T4"\nonly = "0"\npolicy = "first"\nunit = 4\ncolour = 1\nmetrics-port = "9"\n'
    )
    sentences = (
        f"{path}: there is no option simulat: did you mean simulate?; "
        f"{path}: only must be a list of words, not '0'; "
        f"{path}: no policy is called first: choose one of binpack, spread, random, "
        "dotprod, clustering, packing, bestfit, fgd, bid-price; "
        f"{path}: unit must be a word, not 4; "
        f"{path}: there is no option colour: there are simulate, policy, unit, only, mig, driver, "
        "card-memory, metrics-port, price, currency, history-size, charge, shim-only, closed, "
        "no-history; "
        f"{path}: metrics-port must be a number, not '9'"
    )
    for words in (("--show-config",), ("--background",), ()):
        result = station.fenka("daemon", *words)
        assert (result.returncode, result.stderr) == (2, f"fenka: {sentences}\n")
    write("policy = spread\n")
    refused(station.fenka("daemon"), 2, rf"{path} is no TOML: .*")
    write('simulate = "T5"\n')
    refused(station.fenka("daemon"), 2, r".*T5.*T4.*")


def test_root_s_daemon_has_the_machine_s_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other users' commands wait for that daemon where the file is, also right after a boot."""
    monkeypatch.setattr(paths, "SYSTEM", tmp_path / "run")
    monkeypatch.setattr(paths, "SYSTEM_OPTIONS", tmp_path / "daemon.toml")
    system = Runtime(tmp_path / "run")
    assert main.load(system) == {}
    assert not system.established()
    (tmp_path / "daemon.toml").write_text("only = [0, 'GPU-1']")
    assert system.established()
    assert main.load(system) == {"only": ["0", "GPU-1"]}
    (tmp_path / "daemon.toml").write_text("only = [true]")
    with pytest.raises(InvalidOption, match="only must be a list of words"):
        main.load(system)


def test_options_with_their_default_are_not_recorded(tmp_path: Path) -> None:
    """Also if the command line has named them: the last release knows no currency, and would not start."""
    runtime = Runtime(tmp_path)
    named = "".join(["U", "SD"])  # Another object than the default.
    save_config(
        runtime, DaemonConfig(simulate="T4", currency=named, policy="".join(["bin", "pack"]))
    )
    assert json.loads(runtime.config.read_bytes()) == {"simulate": "T4"}
