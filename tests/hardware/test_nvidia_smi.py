"""NVIDIA's own nvidia-smi, of Debian's driver 535, on simulated cards.

It is taken where it is installed, else fetched once into a cache directory: FENKA_TEST_CACHE, or below
the user's own. It is never committed.
"""

import fcntl
import os
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from xml.etree import ElementTree

import pytest

from fenka.hardware.simulated_node import SimulatedNode
from tests.hardware.client import MakeClient, MakeNode

FETCH = Path(__file__).parent.parent / "tools" / "fetch_nvidia_smi.sh"
FETCHED_WITHIN_S = 90

Smi = Callable[..., subprocess.CompletedProcess[str]]


def version(binary: Path) -> str:
    """Return the program's own version; "" if it does not run."""
    try:
        shown = subprocess.run([binary, "--help"], capture_output=True, text=True, check=False)
    except OSError:
        return ""
    version = re.search(r"System Management Interface -- v([0-9.]+)", shown.stdout)
    return version[1] if version else ""


def fetched(cache: Path) -> Path:
    """Return the program below the cache directory. Skip the test if it cannot be fetched."""
    cache.mkdir(parents=True, exist_ok=True)
    # One fetches, the others wait: tests run in several processes.
    with (cache / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for binary in cache.glob("**/nvidia-smi"):
            if version(binary):
                return binary
        try:
            done = subprocess.run(
                [FETCH, cache],
                capture_output=True,
                text=True,
                timeout=FETCHED_WITHIN_S,
                check=False,
            )
        except subprocess.TimeoutExpired:
            pytest.skip(f"Debian's nvidia-smi was not fetched within {FETCHED_WITHIN_S} s")
        if done.returncode != 0:
            why = (done.stderr.strip() or "no reason given").splitlines()[-1]
            pytest.skip(f"Debian's nvidia-smi cannot be fetched here: {why}")
        return Path(done.stdout.splitlines()[-1])


@pytest.fixture(scope="session")
def binary() -> Path:
    """Return an nvidia-smi 535."""
    installed = shutil.which("nvidia-smi")
    if installed and version(Path(installed)).startswith("535."):
        return Path(installed)
    own = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    binary = fetched(Path(os.environ.get("FENKA_TEST_CACHE") or own) / "fenka-tests" / "nvidia-smi")
    if not version(binary).startswith("535."):
        pytest.skip(f"this machine's Debian has nvidia-smi {version(binary)}, not 535")
    return binary


def spec_of(binary: Path, folder: Path, cards: str) -> str:
    """Return the specification of a node whose driver is of the program's version. cards: as in its file."""
    spec = folder / "cards.toml"
    spec.write_text(
        f'version = 1\ndriver_version = "{version(binary)}"\ncuda_version = "12.2"\n{cards}'
    )
    return str(spec)


@pytest.fixture
def node(binary: Path, tmp_path: Path, make_node: MakeNode) -> SimulatedNode:
    """Return a node with a T4 and an A100, whose driver is of the program's version."""
    cards = '[[card]]\nmodel = "T4"\n[[card]]\nmodel = "A100-80G"\n'
    return make_node(spec_of(binary, tmp_path, cards))


@pytest.fixture
def smi(binary: Path, node: SimulatedNode) -> Smi:
    """Run the program on the node."""

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [binary, *words],
            env={"LD_LIBRARY_PATH": str(node.library_dir)},
            capture_output=True,
            text=True,
            check=False,
        )

    return run


@pytest.fixture
def pid(node: SimulatedNode, make_client: MakeClient) -> int:
    """Start a process with 2 GiB on the T4, and return its PID."""
    client = make_client(node).enter()
    client.do("ok(d.cuMemAlloc(2 << 30))", "0")
    return client.pid


def rows(smi: Smi, *words: str) -> list[list[str]]:
    """Return the cells of a --query, which must succeed."""
    done = smi(*words, "--format=csv,noheader")
    assert (done.returncode, done.stderr) == (0, "")
    return [line.split(", ") for line in done.stdout.splitlines()]


def test_table_shows_cards_and_processes(smi: Smi, pid: int, binary: Path) -> None:
    """Without options: versions, both cards with memory, ECC and MIG, and the process."""
    shown = smi()
    assert (shown.returncode, shown.stderr) == (0, "")
    lines = [re.sub(r"\s+", " ", line) for line in shown.stdout.splitlines()]
    text = "\n".join(lines)
    assert f"NVIDIA-SMI {version(binary)} Driver Version: {version(binary)}" in text
    assert "CUDA Version: 12.2" in text
    assert "| 0 Tesla T4 On | 00000000:01:00.0 Off | 0 |" in lines
    assert "2048MiB / 15079MiB" in text
    assert "| 1 NVIDIA A100-SXM4-80GB On | 00000000:02:00.0 Off | 0 |" in lines
    assert "0MiB / 81251MiB" in text
    assert "| | | Disabled |" in lines  # MIG of the A100
    (process,) = (line for line in lines if f" {pid} " in line)
    assert process.startswith(f"| 0 N/A N/A {pid} C ")
    assert process.endswith(" 2048MiB |")
    assert "No running processes found" not in text


def test_list_shows_every_card(smi: Smi, node: SimulatedNode) -> None:
    """-L names cards and UUIDs."""
    listed = re.findall(r"^GPU (\d): (.+) \(UUID: (.+)\)$", smi("-L").stdout, re.MULTILINE)
    assert [(index, name) for index, name, _ in listed] == [
        ("0", "Tesla T4"),
        ("1", "NVIDIA A100-SXM4-80GB"),
    ]
    assert [node.find(uuid) for _, _, uuid in listed] == [0, 1]


def test_queries_return_figures(smi: Smi, node: SimulatedNode, pid: int) -> None:
    """--query-gpu and --query-compute-apps, and a card asked for by its UUID."""
    wanted = (
        "index,name,uuid,memory.used,memory.total,temperature.gpu,power.limit,compute_cap,"
        "ecc.errors.uncorrected.volatile.total,mig.mode.current,driver_version"
    )
    node.set_temperature(0, 77)
    node.add_ecc_errors(0, 3)
    first, second = rows(smi, f"--query-gpu={wanted}")
    uuid = first[2]
    assert [node.find(uuid), node.find(second[2])] == [0, 1]
    assert first[:2] + first[3:10] == [
        *("0", "Tesla T4", "2048 MiB", "15079 MiB", "77", "70.00 W", "7.5", "3", "[N/A]")
    ]
    assert second[3:10] == ["0 MiB", "81251 MiB", "30", "400.00 W", "8.0", "0", "Disabled"]
    (app,) = rows(smi, "--query-compute-apps=pid,used_memory,gpu_uuid,name")
    assert app[:3] == [str(pid), "2048 MiB", uuid]
    assert app[3].endswith("python")
    assert rows(smi, f"--id={second[2]}", "--query-compute-apps=pid") == []
    assert rows(smi, f"--id={second[2]}", "--query-gpu=index") == [["1"]]


def test_xml_has_every_section(smi: Smi, pid: int) -> None:
    """-q -x is well formed and holds cards, memory and processes."""
    done = smi("-q", "-x")
    assert (done.returncode, done.stderr) == (0, "")
    log = ElementTree.fromstring(done.stdout)
    assert log.findtext("attached_gpus") == "2"
    first, second = log.findall("gpu")
    assert first.findtext("product_name") == "Tesla T4"
    assert first.findtext("product_architecture") == "Turing"
    assert first.findtext("fb_memory_usage/used") == "2048 MiB"
    assert first.findtext("fb_memory_usage/total") == "15079 MiB"
    assert first.findtext("ecc_mode/current_ecc") == "Enabled"
    (process,) = first.findall("processes/process_info")
    assert process.findtext("pid") == str(pid)
    assert process.findtext("used_memory") == "2048 MiB"
    assert process.findtext("type") == "C"
    assert second.findtext("mig_mode/current_mig") == "Disabled"
    assert second.findall("processes/process_info") == []


def test_table_shows_many_processes(smi: Smi, node: SimulatedNode, make_client: MakeClient) -> None:
    """Each is in its own row, on its own card."""
    pids = {0: set[str](), 1: set[str]()}
    for turn in range(5):
        pids[turn % 2].add(str(make_client(node).enter(turn % 2).pid))
    pids_by_card = {0: set[str](), 1: set[str]()}
    for uuid, pid in rows(smi, "--query-compute-apps=gpu_uuid,pid"):
        pids_by_card[node.find(uuid)].add(pid)
    assert pids_by_card == pids


def test_error_is_shown_when_a_card_is_lost(smi: Smi, node: SimulatedNode) -> None:
    """It is told, and the other card is still shown when it is asked for."""
    node.lose(0)
    assert "GPU is lost" in "".join((done := smi("-L")).stdout + done.stderr)
    assert rows(smi, "--id=1", "--query-gpu=name") == [["NVIDIA A100-SXM4-80GB"]]
    node.recover(0)
    assert len(rows(smi, "--query-gpu=name")) == 2
