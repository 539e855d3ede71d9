"""mig-parted's configuration file, strictly."""

import pytest

from fenka.formats.mig_parted import CardTarget, InvalidFile, decode, encode, targets

CARDS = {0: "0x20B010DE", 1: "0x233010DE"}


def file(entry: str, head: str = "version: v1") -> bytes:
    """Return a file with one configuration `c` of one entry."""
    return f"{head}\nmig-configs:\n  c:\n  - {{{entry}}}\n".encode()


def test_later_entries_win_and_filters_choose_models() -> None:
    """Counts of 0 count as absent; hexadecimal digits in any case."""
    text = b"""
version: v1
mig-configs:
  "on":
  - {devices: all, mig-enabled: no}
  - {device-filter: "0x20b010DE", devices: [0], mig-enabled: yes, mig-devices: {1g.5gb: 2, 3g.20gb: 0}}
  other: [{devices: all, mig-enabled: true, mig-devices: {1c.3g.20gb: 3}}]
"""
    assert targets(decode(text, "on"), CARDS) == {
        0: CardTarget(True, {"1g.5gb": 2}),
        1: CardTarget(False, {}),
    }


def test_exported_file_describes_the_same() -> None:
    """Also a profile with an attribute."""
    wanted = {0: CardTarget(True, {"1g.10gb+me": 1}), 1: CardTarget(False, {})}
    assert targets(decode(encode("current", wanted).encode(), "current"), CARDS) == wanted


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (b"", "must have version and mig-configs"),
        (b"[", "is no YAML: "),
        (b"\xff", "is no text in UTF-8"),
        (b"a: &x 1\nb: *x\n", "has an alias"),
        (b"version: v1\nversion: v1\n", "has 'version' twice"),
        (b"mig-configs: {c: [{devices: all, mig-enabled: true}]}", "version must be v1, not None"),
        (file("devices: all, mig-enabled: true", "version: v2"), "version must be v1, not v2"),
        (b"version: v1\nmig-configs: {}\n", "must name at least one configuration"),
        (b"version: v1\nmig-configs: {on: []}\n", "true cannot name a configuration"),
        (b"version: v1\nmig-configs: {c: []}\n", "c has no entries"),
        (b"version: v1\nx: 1\nmig-configs: {c: []}\n", "has an unexpected field 'x'"),
        (file("devices: all"), r"\[0\] has no mig-enabled"),
        (file("mig-enabled: true"), r"\[0\] has no devices"),
        (file("devices: some, mig-enabled: true"), "c: .*devices"),
        (file("devices: [-1], mig-enabled: true"), "must be a whole number >= 0"),
        (
            file('devices: all, mig-enabled: "true"'),
            "mig-enabled must be true or false, not a text",
        ),
        (file("devices: all, mig-enabled: true, x: 1"), r"\[0\].x is not known: remove it"),
        (file("devices: all, mig-enabled: false, mig-devices: {1g.5gb: 1}"), "need mig-enabled"),
        (file("devices: all, mig-enabled: true, mig-devices: {1g.5gb: 0}"), "all counts .* are 0"),
        (
            file("devices: all, mig-enabled: true, mig-devices: {1g.5gb: -1}"),
            "must be a whole number >= 0",
        ),
        (
            file("devices: all, mig-enabled: true, mig-devices: {1g.5gb: 1.5}"),
            "must be a whole number, not a number",
        ),
        (
            file("devices: all, mig-enabled: true, mig-devices: {1g.5GB: 1}"),
            "'1g.5GB' is no MIG profile",
        ),
        (
            file("devices: all, mig-enabled: true, mig-devices: {1g.5gb: true}"),
            "must be a whole number, not true or false",
        ),
    ],
)
def test_wrong_file_is_refused_with_one_sentence(text: bytes, sentence: str) -> None:
    """Whatever configuration is asked for."""
    with pytest.raises(InvalidFile, match=sentence) as raised:
        decode(text, "c")
    assert "\n" not in str(raised.value)


def test_entries_of_other_models_are_skipped_when_one_is_for_a_card_here() -> None:
    """NVIDIA's own file has entries for all models under one name."""
    text = b"""
version: v1
mig-configs:
  balanced:
  - {device-filter: ["0x20B210DE"], devices: all, mig-enabled: true, mig-devices: {1g.10gb: 2}}
  - {device-filter: ["0x20B010DE"], devices: all, mig-enabled: true, mig-devices: {1g.5gb: 2}}
"""
    assert targets(decode(text, "balanced"), CARDS) == {0: CardTarget(True, {"1g.5gb": 2})}
    with pytest.raises(InvalidFile, match="0x20B210DE, 0x20B010DE matches no card: here are 0x1"):
        targets(decode(text, "balanced"), {0: "0x1", 1: "0x1"})


@pytest.mark.parametrize(
    ("entry", "sentence"),
    [
        ("devices: [9], mig-enabled: true", "there is no card 9: here are 0, 1"),
        ('device-filter: "0x1EB810DE", devices: all, mig-enabled: true', "matches no card"),
        (
            "devices: all, mig-enabled: true, mig-devices: {1c.3g.20gb: 1}",
            "is a part of a GPU instance",
        ),
    ],
)
def test_entry_is_refused_when_it_does_not_fit_the_machine(entry: str, sentence: str) -> None:
    """Only the configuration that is asked for must fit."""
    with pytest.raises(InvalidFile, match=sentence):
        targets(decode(file(entry), "c"), CARDS)


def test_unknown_configuration_is_refused_with_those_that_there_are() -> None:
    """By name."""
    with pytest.raises(InvalidFile, match="no configuration is called 'd': the file has c"):
        decode(file("devices: all, mig-enabled: true"), "d")
