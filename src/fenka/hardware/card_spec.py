"""Specifications of a simulated node's cards: ``A100-80G*4,T4``, ``L4*2@sockets``, or a TOML file.

    version = 1
    driver_version = "550.163.01"
    cuda_version = "12.4"
    topology = "bridges"

    [[card]]
    model = "T4"
    count = 2
    context_mib = 120

Also per card: memory_mib, reserved_mib, name, uuid, mig_mirrored. Any other key is an error that names it.
"""

import difflib
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Literal, cast, get_args

import msgspec

from fenka.core.errors import INVALID_INPUT, FenkaError
from fenka.formats import documents

MAX_CARDS = 16
"""Cards of one node, by the layout of the simulated driver's shared memory."""

DRIVER_VERSION = "550.163.01"
CUDA_VERSION = "12.4"
CUDA_NEWEST = (13, 5)
"""Version of the headers that the simulated driver is built with: it has no newer functions."""
MAX_MEMORY_MIB = 1 << 24
Topology = Literal["flat", "nvswitch", "bridges", "sockets"]
"""How the cards of a node are connected. flat: all below one host bridge. The others have two sockets:
nvswitch as in a DGX, bridges with NVLink between pairs of cards, sockets without NVLink."""

_UUID = re.compile(r"GPU-[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
_ITEM = re.compile(r"\s*([^*\s]+)\s*(?:\*\s*(\d{1,9})\s*)?")


class NodeError(FenkaError):
    """The simulated node cannot be made, started or stopped. The message says why."""


@dataclass(frozen=True, slots=True)
class CardModel:
    """Properties that all cards of a model share."""

    key: str
    """The name in specifications."""
    name: str
    """The name that NVML reports."""
    memory_mib: int
    """As the driver reports it, which is less than in the data sheet."""
    sm_count: int
    compute_capability: tuple[int, int]
    power_limit_w: int
    idle_power_w: int
    sm_clock_mhz: int
    """Maximum, as the next one."""
    memory_clock_mhz: int
    fan_percent: int = 0
    """At idle; 0 if the chassis cools it, and NVML reports "not supported"."""
    ecc: bool = True
    """Whether its memory counts bit errors; if not, NVML reports "not supported"."""
    pci_device: int = 0
    """The PCI device id."""
    mig: str = ""
    """The geometry in `fenka.core.mig.geometry`; empty if it cannot be divided."""
    reserved_mib: int = 0
    """The part of `memory_mib` that the driver keeps for itself, approximately. 0 where `memory_mib` is what
    drivers before `FIRST_WITH_RESERVE` reported, which left the reserve out."""
    unified: bool = False
    """Whether its memory is that of the machine. NVML reports "not supported" instead of a size."""

    @property
    def usable_mib(self) -> int:
        """The memory that programs can have."""
        return self.memory_mib - self.reserved_mib


FIRST_WITH_RESERVE = 510
"""The first driver whose NVML counts its reserve in a card's memory, and reports it."""


_TABLE = (
    CardModel("P4", "Tesla P4", 7611, 20, (6, 1), 75, 7, 1531, 3003, pci_device=0x1BB3),
    CardModel(
        "P100-16G", "Tesla P100-PCIE-16GB", 16280, 56, (6, 0), 250, 27, 1328, 715, pci_device=0x15F8
    ),
    CardModel(
        "V100-16G", "Tesla V100-SXM2-16GB", 16130, 80, (7, 0), 300, 40, 1530, 877, pci_device=0x1DB1
    ),
    CardModel(
        "V100-32G", "Tesla V100-SXM2-32GB", 32510, 80, (7, 0), 300, 42, 1530, 877, pci_device=0x1DB5
    ),
    CardModel("T4", "Tesla T4", 15079, 40, (7, 5), 70, 10, 1590, 5001, pci_device=0x1EB8),
    CardModel(
        "T4-550",
        "Tesla T4",
        15360,
        40,
        (7, 5),
        70,
        10,
        1590,
        5001,
        pci_device=0x1EB8,
        reserved_mib=450,
    ),
    CardModel("A10", "NVIDIA A10", 22731, 72, (8, 6), 150, 16, 1695, 6251, pci_device=0x2236),
    CardModel(
        "A30", "NVIDIA A30", 24258, 56, (8, 0), 165, 27, 1440, 1215, pci_device=0x20B7, mig="A30"
    ),
    CardModel(
        "A100-40G",
        "NVIDIA A100-SXM4-40GB",
        40536,
        108,
        (8, 0),
        400,
        52,
        1410,
        1215,
        pci_device=0x20B0,
        mig="A100-40G",
    ),
    CardModel(
        "A100-80G",
        "NVIDIA A100-SXM4-80GB",
        81251,
        108,
        (8, 0),
        400,
        60,
        1410,
        1593,
        pci_device=0x20B2,
        mig="A100-80G",
    ),
    CardModel(
        "L4",
        "NVIDIA L4",
        23034,
        58,
        (8, 9),
        72,
        12,
        2040,
        6251,
        pci_device=0x27B8,
        reserved_mib=450,
    ),
    CardModel(
        "H100-80G",
        "NVIDIA H100 80GB HBM3",
        81559,
        132,
        (9, 0),
        700,
        70,
        1980,
        2619,
        pci_device=0x2330,
        mig="H100-80G",
        reserved_mib=400,
    ),
    CardModel(
        "H200",
        "NVIDIA H200",
        143771,
        132,
        (9, 0),
        700,
        75,
        1980,
        3201,
        pci_device=0x2335,
        mig="H200-141G",
        reserved_mib=600,
    ),
    CardModel(
        "H100-NVL",
        "NVIDIA H100 NVL",
        95830,
        132,
        (9, 0),
        400,
        60,
        1785,
        2619,
        pci_device=0x2321,
        mig="H100-NVL",
        reserved_mib=450,
    ),
    CardModel(
        "H100-96G",
        "NVIDIA GH200 96GB HBM3",
        97871,
        132,
        (9, 0),
        700,
        70,
        1980,
        2619,
        pci_device=0x2342,
        mig="H100-96G",
        reserved_mib=450,
    ),
    CardModel(
        "B200",
        "NVIDIA B200",
        183359,
        148,
        (10, 0),
        1000,
        140,
        1965,
        3996,
        pci_device=0x2901,
        mig="B200",
        reserved_mib=550,
    ),
    CardModel(
        "GB200",
        "NVIDIA GB200",
        189471,
        152,
        (10, 0),
        1200,
        140,
        2062,
        3996,
        pci_device=0x2941,
        mig="GB200",
        reserved_mib=600,
    ),
    CardModel(
        "RTXPRO6000",
        "NVIDIA RTX PRO 6000 Blackwell Server Edition",
        97887,
        188,
        (12, 0),
        600,
        30,
        2430,
        12481,
        pci_device=0x2BB5,
        mig="RTXPRO6000",
        reserved_mib=600,
    ),
    CardModel(
        "RTX4090",
        "NVIDIA GeForce RTX 4090",
        24564,
        128,
        (8, 9),
        450,
        20,
        3105,
        10501,
        30,
        False,
        0x2684,
        reserved_mib=380,
    ),
    CardModel(
        "GB10",
        "NVIDIA GB10",
        122570,
        48,
        (12, 1),
        140,
        5,
        3003,
        8533,
        ecc=False,
        pci_device=0x2E12,
        unified=True,
    ),
)

MODELS = {model.key: model for model in _TABLE}
"""The models of simulated cards by key, with the figures that NVML reports of real ones."""


class BadSpec(FenkaError):
    """A specification is invalid. The message says why."""

    exit_code = INVALID_INPUT


@dataclass(frozen=True, slots=True)
class SimulatedCard:
    """A card to simulate."""

    model: CardModel
    memory_mib: int
    name: str
    uuid: str | None = None
    """None: derived from the node's directory, the card's index and its model."""
    context_mib: int = 0
    """Device memory that a process's first context takes."""
    reserved_mib: int = 0
    """The part of `memory_mib` that the driver keeps for itself."""
    mig_mirrored: bool = False
    """Whether the halves of the card are exchanged in the ids of GPU instances, as on some real cards."""
    driver_version: str = DRIVER_VERSION
    """The node's, and so the same on all its cards; as the next one."""
    cuda_version: str = CUDA_VERSION
    topology: Topology = "flat"


class _FileCard(msgspec.Struct, forbid_unknown_fields=True):
    model: str
    count: Annotated[int, msgspec.Meta(ge=1, le=MAX_CARDS)] = 1
    memory_mib: Annotated[int, msgspec.Meta(ge=1, le=MAX_MEMORY_MIB)] | None = None
    name: Annotated[str, msgspec.Meta(min_length=1, max_length=63)] | None = None
    uuid: str | None = None
    context_mib: Annotated[int, msgspec.Meta(ge=0, le=MAX_MEMORY_MIB)] = 0
    reserved_mib: Annotated[int, msgspec.Meta(ge=0, le=MAX_MEMORY_MIB)] | None = None
    mig_mirrored: bool = False


class _File(msgspec.Struct, forbid_unknown_fields=True):
    version: Literal[1]
    card: list[_FileCard]
    driver_version: Annotated[str, msgspec.Meta(pattern=r"^\d+(\.\d+)+\Z", max_length=79)] = (
        DRIVER_VERSION
    )
    cuda_version: Annotated[str, msgspec.Meta(pattern=r"^\d{1,3}\.\d{1,2}\Z")] = CUDA_VERSION
    topology: Topology = "flat"


def parse_spec(text: str) -> tuple[SimulatedCard, ...]:
    """Return the cards of a short form (``T4``, ``A100-80G*4,T4``, ``L4*2@sockets``) or of a TOML file.

    Raises BadSpec.
    """
    if "/" in text or text.endswith(".toml"):
        return _checked(_from_file(Path(text)))
    listed, at, topology = text.partition("@")
    if at and topology.strip() not in get_args(Topology):
        known = ", ".join(get_args(Topology))
        raise BadSpec(f"no topology is called {topology.strip()!r}: known are {known}")
    cards: list[SimulatedCard] = []
    for item in listed.split(","):
        match = _ITEM.fullmatch(item)
        if match is None:
            raise BadSpec(
                f"cannot read {item.strip()!r} in {text!r}: write a model, or a model * a number, "
                f"as in T4 or V100-16G*2"
            )
        count = int(match[2] or 1)
        if not 1 <= count <= MAX_CARDS:
            raise BadSpec(f"{item.strip()}: a node has 1 to {MAX_CARDS} cards")
        model = model_called(match[1])
        cards += [_card(model)] * count
    if at:
        cards = [replace(card, topology=cast(Topology, topology.strip())) for card in cards]
    return _checked(cards)


def model_called(key: str) -> CardModel:
    """Return the model with this key, or with this name of NVML's. Raises BadSpec."""
    by_key = {known.casefold(): model for known, model in MODELS.items()}
    by_name = {model.name.casefold(): model for model in MODELS.values()}
    if model := by_key.get(key.casefold()) or by_name.get(key.casefold()):
        return model
    matching = [known for known in by_key if known.startswith(key.casefold())]
    near = matching or _nearest(key.casefold(), by_key)
    hint = f"did you mean {' or '.join(by_key[known].key for known in near)}? " if near else ""
    raise BadSpec(f"no model is called {key}: {hint}Known are {', '.join(MODELS)}")


def _nearest(key: str, known: Iterable[str]) -> list[str]:
    """Return the most similar of the known keys, of equal ones the shortest; none if none is similar."""
    similar = difflib.get_close_matches(key, known, n=3, cutoff=0.4)
    ratio = {other: difflib.SequenceMatcher(None, other, key).ratio() for other in similar}
    return sorted(similar, key=lambda other: (-ratio[other], len(other)))[:1]


def _from_file(path: Path) -> list[SimulatedCard]:
    try:
        file = documents.convert(msgspec.toml.decode(path.read_bytes()), _File, "the file")
    except OSError as error:
        raise BadSpec(f"cannot read {path}: {error.strerror}") from None
    except (documents.InvalidDocument, msgspec.MsgspecError, ValueError) as error:
        raise BadSpec(f"{path}: {error}") from None
    if tuple(map(int, file.cuda_version.split("."))) > CUDA_NEWEST:
        newest = ".".join(map(str, CUDA_NEWEST))
        raise BadSpec(
            f"{path}: the simulated driver has the functions of CUDA up to {newest}: "
            f'write cuda_version = "{newest}" or an earlier one'
        )
    cards: list[SimulatedCard] = []
    for entry in file.card:
        if entry.uuid is not None and entry.count > 1:
            raise BadSpec(f"{path}: one uuid cannot serve {entry.count} cards")
        model = model_called(entry.model)
        card = _card(model, entry, file.driver_version)
        card = replace(card, cuda_version=file.cuda_version, topology=file.topology)
        cards += [card] * entry.count
    return cards


def _card(
    model: CardModel, entry: _FileCard | None = None, driver_version: str = DRIVER_VERSION
) -> SimulatedCard:
    """Return a card as this driver reports it. Drivers without a reserve leave it out of the memory.

    entry: what a file overrides. A card whose memory a file states has only the reserve that it states.
    """
    entry = entry or _FileCard(model.key)
    memory_mib = model.memory_mib if entry.memory_mib is None else entry.memory_mib
    reserved_mib = entry.reserved_mib
    if reserved_mib is None:
        reserved_mib = model.reserved_mib if entry.memory_mib is None else 0
        if int(driver_version.partition(".")[0]) < FIRST_WITH_RESERVE:
            memory_mib, reserved_mib = memory_mib - reserved_mib, 0
    return SimulatedCard(
        model,
        memory_mib,
        entry.name or model.name,
        uuid=entry.uuid,
        context_mib=entry.context_mib,
        reserved_mib=reserved_mib,
        mig_mirrored=entry.mig_mirrored,
        driver_version=driver_version,
    )


def _checked(cards: list[SimulatedCard]) -> tuple[SimulatedCard, ...]:
    if not 1 <= len(cards) <= MAX_CARDS:
        raise BadSpec(f"a node has 1 to {MAX_CARDS} cards, not {len(cards)}")
    uuids = [card.uuid for card in cards if card.uuid is not None]
    for uuid in uuids:
        if not _UUID.fullmatch(uuid):
            raise BadSpec(f"{uuid} is no card's UUID: it looks like GPU-{'x' * 8}-xxxx-…, in hex")
        if uuids.count(uuid) > 1:
            raise BadSpec(f"two cards cannot both be {uuid}")
    for card in cards:
        if card.reserved_mib >= card.memory_mib:
            raise BadSpec(
                f"reserved_mib must be less than the card's memory of {card.memory_mib} MiB, "
                f"not {card.reserved_mib}"
            )
        if len(card.name.encode()) > 63:
            raise BadSpec(f"the name {card.name!r} is longer than 63 bytes")
        if "\0" in card.name:
            raise BadSpec("a card's name cannot hold a NUL character")
    return tuple(cards)
