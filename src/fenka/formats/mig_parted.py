"""The configuration file of NVIDIA's mig-parted: layouts by name, read strictly.

It is YAML 1.1 as there: on, off, yes and no are booleans, and no names.
"""

import re
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Annotated, Any, Literal

import msgspec

from fenka.core.errors import INVALID_INPUT, FenkaError
from fenka.formats import documents
from fenka.formats.mig_profiles import PROFILE

MAX_BYTES = 256 * 1024

_COMPUTE_PART = re.compile(r"[1-9]c\.")


class InvalidFile(FenkaError):
    """The file is wrong; the message says what and where."""

    exit_code = INVALID_INPUT


class ConfigEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="kebab"):
    """The layout that a configuration gives to some cards.

    Attributes:
        devices: Indexes of cards, or all.
        mig_enabled: Whether they are in MIG mode.
        device_filter: PCI ids of the models that it is for; empty for all.
        mig_devices: How many instances of each profile.
    """

    devices: Literal["all"] | list[Annotated[int, msgspec.Meta(ge=0)]]
    mig_enabled: bool
    device_filter: str | list[str] = []
    mig_devices: dict[str, Annotated[int, msgspec.Meta(ge=0)]] = {}


class CardTarget(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How a card is to be divided. counts: the number of instances by profile; none without MIG."""

    enabled: bool
    counts: Mapping[str, int] = {}


def decode(data: bytes, name: str) -> list[ConfigEntry]:
    """Return the entries of a configuration. The whole file must be right. Raises InvalidFile."""
    file = _load(data)
    if not isinstance(file, dict):
        raise InvalidFile("the file must have version and mig-configs")
    unexpected = sorted(map(str, file.keys() - {"version", "mig-configs"}))
    if unexpected:
        raise InvalidFile(f"the file has an unexpected field {unexpected[0][:40]!r}: remove it")
    if file.get("version") != "v1":
        raise InvalidFile(f"version must be v1, not {str(file.get('version'))[:40]}")
    configs = file.get("mig-configs")
    if not isinstance(configs, dict) or not configs:
        raise InvalidFile("mig-configs must name at least one configuration")
    for other in configs:
        if not isinstance(other, str):
            raise InvalidFile(
                f"{str(other).lower()} cannot name a configuration: YAML reads on, off, yes, no and "
                "numbers as other than text, quote it"
            )
    decoded = {name: _entries(name, entries) for name, entries in configs.items()}
    if name not in decoded:
        known = ", ".join(sorted(decoded))[:400]
        raise InvalidFile(f"no configuration is called {name[:40]!r}: the file has {known}")
    return decoded[name]


def targets(entries: Sequence[ConfigEntry], cards: Mapping[int, str]) -> dict[int, CardTarget]:
    """Return what each card is to be; later entries win. Cards that no entry is for are left out.

    A file may be for several models: an entry whose filter matches no card is skipped if another one's does.

    Args:
        entries: Of one configuration.
        cards: PCI ids of all cards by index, `0x20B010DE`.

    Raises:
        InvalidFile: No entry's filter matches, or one names a card that is not there, or a part of a GPU
            instance.
    """
    chosen, unmatched = dict[int, CardTarget](), list[str]()
    for entry in entries:
        filters = (
            [entry.device_filter] if isinstance(entry.device_filter, str) else entry.device_filter
        )
        wanted = {word.lower() for word in filters}
        matching = [index for index, pci in cards.items() if not wanted or pci.lower() in wanted]
        if not matching:
            unmatched += filters
            continue
        if entry.devices != "all":
            missing = [index for index in entry.devices if index not in cards]
            if missing:
                raise InvalidFile(
                    f"there is no card {missing[0]}: here are {', '.join(map(str, cards))}"
                )
        parts = [profile for profile in entry.mig_devices if _COMPUTE_PART.match(profile)]
        if parts:
            raise InvalidFile(
                f"{parts[0][:40]} is a part of a GPU instance, which fenka does not create: use whole ones"
            )
        counts = {profile: count for profile, count in entry.mig_devices.items() if count}
        for index in matching:
            if entry.devices == "all" or index in entry.devices:
                chosen[index] = CardTarget(entry.mig_enabled, counts)
    if unmatched and not chosen:
        here = ", ".join(dict.fromkeys(cards.values()))
        raise InvalidFile(
            f"device-filter {', '.join(unmatched)[:200]} matches no card: here are {here}"
        )
    return chosen


def encode(name: str, cards: Mapping[int, CardTarget]) -> str:
    """Return a file with one configuration, which makes the cards what they are."""
    entries = [
        {"devices": [index], "mig-enabled": target.enabled, "mig-devices": dict(target.counts)}
        for index, target in cards.items()
    ]
    return msgspec.yaml.encode({"version": "v1", "mig-configs": {name: entries}}).decode()


def _entries(name: str, entries: Any) -> list[ConfigEntry]:
    try:
        decoded = documents.convert(entries, list[ConfigEntry], "the configuration")
    except documents.InvalidDocument as why:
        raise InvalidFile(f"{name[:40]}: {why}") from None
    if not decoded:
        raise InvalidFile(f"{name[:40]} has no entries")
    for entry in decoded:
        if entry.mig_devices and not entry.mig_enabled:
            raise InvalidFile(f"{name[:40]}: mig-devices need mig-enabled: true")
        if entry.mig_devices and not any(entry.mig_devices.values()):
            raise InvalidFile(
                f"{name[:40]}: all counts of mig-devices are 0: leave mig-devices empty for no instances"
            )
        for profile in entry.mig_devices:
            if not PROFILE.fullmatch(_COMPUTE_PART.sub("", profile, count=1)):
                raise InvalidFile(
                    f"{name[:40]}: {profile[:40]!r} is no MIG profile: names are like 1g.5gb"
                )
    return decoded


def _load(data: bytes) -> Any:
    import yaml

    if len(data) > MAX_BYTES:
        raise InvalidFile(f"the file has more than {MAX_BYTES} bytes")
    try:
        return yaml.load(data.decode(), _loader())
    except UnicodeDecodeError:
        raise InvalidFile("the file is no text in UTF-8") from None
    except (yaml.YAMLError, ValueError, RecursionError) as why:
        raise InvalidFile(f"the file is no YAML: {' '.join(str(why).split())[:200]}") from None


@cache
def _loader() -> Any:
    import yaml

    class Loader(yaml.SafeLoader):
        """Rejects what could hide a mistake."""

        def compose_node(self, parent: Any, index: Any) -> Any:
            """Reject aliases, by which a small file becomes a huge value."""
            if self.check_event(yaml.AliasEvent):
                raise InvalidFile("the file has an alias: write the value itself")
            return super().compose_node(parent, index)

        def construct_mapping(self, node: Any, deep: bool = False) -> Any:
            """Reject a key that is there twice."""
            names = [key.value for key, _ in node.value]
            if len(set(map(str, names))) < len(names):
                twice = next(name for name in names if names.count(name) > 1)
                raise InvalidFile(f"the file has {str(twice)[:40]!r} twice: remove one")
            return super().construct_mapping(node, deep)

    return Loader
