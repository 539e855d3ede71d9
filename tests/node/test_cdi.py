"""The CDI specification: all or nothing, and only the chosen cards."""

from dataclasses import replace
from pathlib import Path

import pytest

from fenka.core.inventory import Card
from fenka.hardware.nvml import Reading
from fenka.node import main
from fenka.node.lease import cdi
from fenka.node.main import Config, PreflightError
from fenka.node.monitor.health import CardHealth
from tests.node.harness import FakeHardware, card

VERSION = "550.163.01"


def driver(root: Path) -> None:
    """The files of a driver, and of two cards."""
    libraries = root / cdi.LIBRARY_DIRECTORIES[0].relative_to("/")
    libraries.mkdir(parents=True)
    for name in ("cuda", "nvidia-ml", "nvidia-ptxjitcompiler", "nvcuvid", "GLX_nvidia"):
        (libraries / f"lib{name}.so.{VERSION}").touch()
    (libraries / "libnvidia-ml.so.1").symlink_to(f"libnvidia-ml.so.{VERSION}")
    (root / "dev").mkdir()
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm"):
        (root / "dev" / name).touch()
    (root / "usr" / "bin").mkdir()
    (root / "usr" / "bin" / "nvidia-smi").touch()


def test_real_cards(tmp_path: Path) -> None:
    """Only the chosen card's node; the driver's own two libraries behind the proxy, the others in place."""
    driver(tmp_path)
    made = cdi.real([1], VERSION, tmp_path)
    assert [str(it) for it in made.devices] == ["/dev/nvidia1", "/dev/nvidiactl", "/dev/nvidia-uvm"]
    place = cdi.LIBRARY_DIRECTORIES[0]
    assert made.libraries == {
        "libcuda.so.1": place / f"libcuda.so.{VERSION}",
        "libnvidia-ml.so.1": place / f"libnvidia-ml.so.{VERSION}",
    }
    targets = {str(it.target) for it in made.mounts}
    assert f"{place}/libnvidia-ptxjitcompiler.so.1" in targets
    assert "/usr/bin/nvidia-smi" in targets
    assert not any("libcuda.so" in it or "libnvidia-ml" in it or "GLX" in it for it in targets)
    assert cdi.nvml_directory(tmp_path) == tmp_path / place.relative_to("/")


def test_no_driver(tmp_path: Path) -> None:
    """A sentence, for the agent's log."""
    with pytest.raises(cdi.NoDriverFiles, match=r"no libcuda\.so\.550\.163\.01 in"):
        cdi.real([0], VERSION, tmp_path)


def test_one_specification_has_it_all(library: Path, tmp_path: Path) -> None:
    """Shim, limits, account, driver and proxy: every source of the node exists, every target once."""
    spec = cdi.specification("t", tmp_path, library, cdi.simulated(library, tmp_path), {"A": "b=c"})
    (device,) = spec["devices"]
    assert (spec["kind"], device["name"]) == ("fenka.io/lease", "t")
    found = device["containerEdits"]
    assert found["env"] == ["A=b=c"]
    assert "deviceNodes" not in found
    targets = [it["containerPath"] for it in found["mounts"]]
    assert len(set(targets)) == len(targets)
    assert {
        "/run/fenka/lease",
        "/run/fenka/lease/libfenka.so",
        "/run/fenka/account",
        "/run/fenka/driver/libcuda.so.1",
        "/run/fenka/simulated",
        "/etc/ld.so.preload",
        "/etc/ld-nix.so.preload",
        "/usr/lib64/libcuda.so.1",
        f"{cdi.LIBRARY_DIRECTORIES[0]}/libnvidia-ml.so.1",
    } <= set(targets)
    written = [it["containerPath"] for it in found["mounts"] if "rw" in it["options"]]
    assert written == ["/run/fenka/account", "/run/fenka/simulated"]
    made_later = ("/lease", "/account")
    for it in found["mounts"]:
        assert Path(it["hostPath"]).exists() or it["hostPath"].endswith(made_later), it


@pytest.mark.parametrize(
    ("version", "assumed", "served"),
    [
        ("containerd://2.4.2", False, True),
        ("containerd://v2.0.0+unknown", False, True),
        ("containerd://1.7.27", False, False),
        ("containerd://1.7.27", True, True),
        ("containerd://1.6.20~ds1", True, False),
        ("cri-o://1.33.0", False, True),
        ("docker://27.1.0", False, False),
        ("something", False, True),
    ],
)
def test_runtimes(version: str, assumed: bool, served: bool) -> None:
    """Those that drop CDI devices without a word are refused with a sentence."""
    if served:
        main.check_runtime(version, assume_cdi=assumed)
        return
    with pytest.raises(PreflightError, match=r"containerd 2\.0"):
        main.check_runtime(version, assume_cdi=assumed)


def test_units_that_cannot_be_told() -> None:
    """The sentence names a unit that works."""
    cards = CardHealth(FakeHardware(tuple(card(n, 81251) for n in range(8))))  # type: ignore[arg-type]
    with pytest.raises(PreflightError, match="use --unit 4MiB or larger"):
        main.check_unit(cards, 1)
    main.check_unit(cards, 4)
    with pytest.raises(PreflightError, match="smaller --unit"):
        main.check_unit(cards, 1 << 20)


def test_options_are_checked_first() -> None:
    """Before anything is touched."""
    with pytest.raises(PreflightError, match="--over-limit is report or evict, not kill"):
        main.run(Config("n", over_limit="kill"))


def test_a_card_that_was_sick_is_well_after_it_was_lost_and_found() -> None:
    """Which is what a reset looks like; an XID of a program's own changes nothing."""
    hardware = FakeHardware((card(0), card(1)))
    cards = CardHealth(hardware)  # type: ignore[arg-type]
    cards.refresh()
    cards.report(card(0).uuid, 13)
    assert cards.why(card(0).uuid) is None
    cards.report(card(0).uuid, 48)
    assert [it.healthy for it in cards.now(())] == [False, True]
    hardware.lost.add(card(0).uuid)
    cards.refresh()
    assert cards.why(card(0).uuid) == "it has fallen off the bus"
    hardware.lost.clear()
    cards.refresh()
    assert cards.why(card(0).uuid) is None
    assert [it.cordoned for it in cards.now({1})] == [False, True]
    assert isinstance(cards.readings[card(0).uuid], Reading)


def test_what_a_card_reported_outlives_the_agent(tmp_path: Path) -> None:
    """Until it was reset: somebody says so, or it was away, or the node started anew."""
    notes = tmp_path / "health.json"
    hardware = FakeHardware((card(0), card(1)))

    def started() -> CardHealth:
        cards = CardHealth(hardware, notes)  # type: ignore[arg-type]
        cards.refresh()
        return cards

    started().report(None, 48)
    assert [started().why(card(n).uuid) for n in (0, 1)] == ["XID 48"] * 2
    started().reset({1, 7})
    assert [started().why(card(n).uuid) for n in (0, 1)] == ["XID 48", None]
    notes.unlink()
    assert started().why(card(0).uuid) is None
    notes.write_text("[]")
    assert started().why(card(0).uuid) is None


def test_a_card_that_was_lost_before_the_start() -> None:
    """Known from what is written on the node."""
    hardware = FakeHardware((card(0),))
    cards = CardHealth(hardware)  # type: ignore[arg-type]
    cards.remember([card(0), card(1)])
    cards.refresh()
    assert [(it.index, it.healthy) for it in cards.now(())] == [(0, True), (1, False)]
    hardware.cards = (card(0), card(1))
    cards.refresh()
    assert all(it.healthy for it in cards.now(()))
    hardware.lost.add(card(1).uuid)
    cards.refresh()
    cards.forget_lost()
    assert cards.known == (card(0),)


def test_a_driver_that_counts_anew_without_a_lost_card() -> None:
    """Who was card 2 stays card 2; a new card takes the lost one's place; else the driver is right."""
    had = [card(0), card(1), card(2)]

    def after(*shown: Card) -> list[tuple[int, str, bool]]:
        cards = CardHealth(FakeHardware(shown))  # type: ignore[arg-type]
        cards.remember(had)
        cards.refresh()
        return [(it.index, it.uuid, it.healthy) for it in cards.now(())]

    a, b, c, new = (card(n).uuid for n in range(4))
    moved = replace(card(2), index=1)
    assert after(card(0), moved) == [(0, a, True), (1, b, False), (2, c, True)]
    assert after(card(0), moved, replace(card(3), index=2)) == [
        (0, a, True),
        (1, new, True),
        (2, c, True),
    ]
    turned = (replace(card(1), index=0), replace(card(0), index=1), card(2))
    assert [it[:2] for it in after(*turned)] == [(0, b), (1, a), (2, c)]
