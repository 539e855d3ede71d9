"""The page about the autoscaler without a cloud: its files and its commands."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
import yaml

from e2e import elastic
from fenka.cloud.simulated_cloud import CloudState
from tests.autoscaler.test_program import waiting_pod
from tests.cli.command import fenka
from tests.fakes.api_server import FakeApiServer, in_thread
from tests.waiting import wait_until

PAGE = (Path(__file__).parents[2] / "docs" / "do" / "autoscale-trial.md").read_text()
SECTION = PAGE.partition("\n## ")[0]
FILES = ("scenario.json", "config.yaml", "case.json")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Provide the current directory of a reader, with the section's files."""
    for name, text in zip(FILES, re.findall(r"```\w+\n(.*?)```", SECTION, re.DOTALL), strict=False):
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def commands() -> dict[str, str]:
    """Return what each of the section's commands prints."""
    blocks = re.findall(r"^\$ fenka (.*)\n((?:(?!\$|```).*\n)*)", SECTION, re.MULTILINE)
    return dict(blocks)


@pytest.mark.usefixtures("folder")
def test_commands_without_a_cluster_print_what_the_page_says() -> None:
    """But for the time that planning takes."""
    took = re.compile(r"planned in .* s")
    printing = {words: printed for words, printed in commands().items() if printed}
    assert len(printing) == 2
    for words, printed in printing.items():
        result = fenka(*shlex.split(words))
        assert (result.exit_code, result.stderr) == (0, "")
        assert took.sub("", result.stdout) == took.sub("", printed)


def test_command_on_a_cluster_buys_a_simulated_machine(folder: Path) -> None:
    """The state is written where the page says."""
    (words,) = [shlex.split(words) for words, printed in commands().items() if not printed]
    state = folder / "cloud" / "cloud.json"

    def machines() -> int:
        return len(msgspec.json.decode(state.read_bytes(), type=CloudState).machines)

    server = FakeApiServer.of(pods=[waiting_pod("a")])
    with in_thread(server, folder) as kubeconfig:
        words += [f"--kubeconfig={kubeconfig}", "--port=0"]
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "fenka", *words], cwd=folder, stderr=subprocess.DEVNULL
        )
        try:
            wait_until(lambda: state.exists() and machines() == 1)
        finally:
            process.kill()
            process.wait()


def test_command_that_starts_nodes_is_that_of_the_real_cluster(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes the words that the provider adds."""
    text = re.findall(r"```yaml\n(.*?)```", SECTION, re.DOTALL)[1]
    python, option, module, _ = yaml.safe_load(text)["provider"]["command"]
    assert (python, option, module) == ("python", "-m", elastic.__name__)
    (configure,) = re.findall(r"^\$ python -m e2e.elastic \S+ (.*)$", SECTION, re.MULTILINE)
    assert elastic.main([str(tmp_path), *shlex.split(configure)]) == 0
    started: list[str] = []
    monkeypatch.setattr(elastic, "follow_in_background", lambda _, name: started.append(name))
    assert elastic.main([str(tmp_path), "start", "i-1", "t4", "gn6i", "g"]) == 0
    instance = elastic.Instances(tmp_path).read("i-1")
    assert instance is not None
    labels, provider_id = elastic.Instances(tmp_path).flags(instance)
    assert {"gpushare=true", "fenka.io/simulated=t4"} < set(
        labels.removeprefix("--node-labels=").split(",")
    )
    assert provider_id == "--provider-id=simulated:///g/i-1"
    assert elastic.main([str(tmp_path), "end", "i-1"]) == 0
    assert started == ["i-1", "i-1"]
