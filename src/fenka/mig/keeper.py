"""Records fenka's instances, and changes them so that a kill between two steps leaves nothing behind.

    intended ──> created ──> ready ──> emptying ──> removing ──> (no record)
                 GPU inst.   compute   compute      GPU inst.
                 created     created   destroyed    destroyed

Each stage is on disk before the next step, and `settle` finishes what an earlier program has left. Instances
without a record are an administrator's: they occupy their place, and they are never destroyed.
"""

import contextlib
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import msgspec
from msgspec.structs import replace

from fenka.core.errors import FenkaError
from fenka.core.inventory import DeviceId, InstanceId
from fenka.core.mig.geometry import Geometry, Place
from fenka.core.units import MIB
from fenka.hardware import nvml_mig
from fenka.hardware.nvml_mig import (
    CardLost,
    GpuInstance,
    InstanceInUse,
    MigError,
    NoRoomForInstance,
    NoSuchInstance,
)
from fenka.isolation.lease_files import (
    decode_json,
    describe_os_error,
    read_regular_file,
    write_atomically,
)

MAX_FILE_BYTES = MIB

Stage = Literal["intended", "created", "ready", "emptying", "removing", "lost"]
"""intended: a GPU instance may exist, without a compute instance. created: it exists. ready: so does its
compute instance. emptying: this one is being destroyed. removing: so is the GPU instance. lost: somebody else
destroyed it, and a lease still names it."""


class InvalidRecords(FenkaError):
    """The file of records is damaged."""


class GpuInstanceRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One instance.

    Attributes:
        card: The card's UUID.
        profile: The profile's name.
        start: The first slice of the card's memory axis.
        generation: A number that no other instance of this machine had since it was started.
        stage: How far its creation or destruction has come.
        gpu_instance: The driver's id; None before it exists.
        uuid: The device's, once it is ready.
        kept: Whether it stays while nobody uses it.
    """

    card: str
    profile: str
    start: int
    generation: int
    stage: Stage = "intended"
    gpu_instance: int | None = None
    uuid: str = ""
    kept: bool = False

    @property
    def instance(self) -> InstanceId:
        """Its card and place."""
        return InstanceId(DeviceId(self.card), self.start, self.profile)


class RecordFile(msgspec.Struct, forbid_unknown_fields=True):
    """All records. boot: instances never outlive the machine's start. last: the last generation."""

    boot: str
    last: int = 0
    records: list[GpuInstanceRecord] = []
    version: Literal[1] = 1


def load(path: Path, boot: str) -> RecordFile:
    """Return the records of this boot; none if there is no file. Raises InvalidRecords."""
    try:
        recorded = decode_json(
            msgspec.json.Decoder(RecordFile), read_regular_file(path, MAX_FILE_BYTES)
        )
    except FileNotFoundError:
        return RecordFile(boot)
    except OSError as why:
        raise InvalidRecords(
            f"{describe_os_error(why)}; it records which instances are fenka's"
        ) from None
    except msgspec.DecodeError as why:
        raise InvalidRecords(
            f"{path} is not understood ({why}): remove it, and destroy fenka's instances with `nvidia-smi "
            "mig -dci` and `-dgi`, for they count as an administrator's then"
        ) from None
    return recorded if recorded.boot == boot else RecordFile(boot)


def save(path: Path, records: RecordFile) -> None:
    """Write the records to disk. Raises OSError."""
    write_atomically(path, msgspec.json.encode(records))


@dataclass(eq=False)
class InstanceKeeper:
    """The instances of one program's cards.

    Attributes:
        path: The file of records.
        boot: An id of the machine's start.
        geometries: What each card can be divided into, by UUID.
    """

    path: Path
    boot: str
    geometries: Mapping[str, Geometry]
    _file: RecordFile = field(init=False)

    def __post_init__(self) -> None:
        """Raises InvalidRecords."""
        self._file = load(self.path, self.boot)

    @property
    def records(self) -> tuple[GpuInstanceRecord, ...]:
        """All records, in the order of their creation."""
        return tuple(self._file.records)

    def record(self) -> None:
        """Write all records again. Raises OSError."""
        save(self.path, self._file)

    def find(self, uuid: str) -> GpuInstanceRecord | None:
        """Return the record of a device; None if it is not fenka's."""
        return next((record for record in self._file.records if uuid and record.uuid == uuid), None)

    # --- changes ------------------------------------------------------------------------------------

    def create(self, card: str, place: Place, *, kept: bool = False) -> GpuInstanceRecord:
        """Create an instance that programs can use.

        Raises:
            MigError: It cannot be created; nothing is left of it.
            OSError: It cannot be recorded; nothing, or what `settle` removes, is left of it.
        """
        # An instance that is there before must not be taken for fenka's after a kill.
        for gpu in nvml_mig.instances(card, self.geometries[card]):
            if Place(gpu.profile, gpu.start).mask & place.mask:
                raise NoRoomForInstance(f"{place} of {card} is taken by GPU instance {gpu.id}")
        number = self._file.last + 1
        record = GpuInstanceRecord(card, place.profile.name, place.start, number, kept=kept)
        self._store(record)
        try:
            gpu_id = nvml_mig.create_gpu_instance(card, place.profile, place.start)
        except MigError:
            self._drop(record)
            raise
        record = self._store(replace(record, stage="created", gpu_instance=gpu_id))
        try:
            device = nvml_mig.create_compute_instance(card, gpu_id)
        except MigError:
            self.destroy(record)
            raise
        return self._store(replace(record, stage="ready", uuid=device.uuid))

    def destroy(self, record: GpuInstanceRecord) -> None:
        """Destroy an instance of fenka's. One that is gone, or not fenka's any more, is only forgotten.

        Raises:
            InstanceInUse: A process still uses it. Repeat the call later.
            OSError: It could not be recorded. Repeat the call later.
        """
        gpu = self._existing(record)
        if gpu is None or record.stage == "lost":
            self._drop(record)
            return
        if record.stage != "removing":
            record = self._store(replace(record, stage="emptying", gpu_instance=gpu.id))
            for compute in gpu.compute:
                nvml_mig.destroy_compute_instance(record.card, gpu.id, compute.id)
            record = self._store(replace(record, stage="removing"))
        with contextlib.suppress(NoSuchInstance):
            nvml_mig.destroy_gpu_instance(record.card, gpu.id)
        self._drop(record)

    def keep(self, record: GpuInstanceRecord, *, kept: bool) -> None:
        """Change whether an instance stays while nobody uses it. Raises OSError."""
        self._store(replace(record, kept=kept))

    def settle(self, leased: Collection[str]) -> list[GpuInstanceRecord]:
        """Destroy what `unused` returns. Return the instances that are still in use. Raises OSError."""
        return self.destroy_all(self.unused(leased))

    def unused(self, leased: Collection[str]) -> list[GpuInstanceRecord]:
        """Return what nobody uses and what is unfinished. Raises OSError.

        Ask at the start, when a lease has ended, and later while instances are in use.

        Args:
            leased: UUIDs of the devices that leases name. These stay as they are.
        """
        self.observe()
        return [
            record
            for record in self.records
            if record.uuid not in leased and not (record.stage == "ready" and record.kept)
        ]

    def destroy_all(self, unused: Iterable[GpuInstanceRecord]) -> list[GpuInstanceRecord]:
        """Destroy instances. Return those that are still in use, or on a lost card. Raises OSError."""
        lingering = []
        for record in unused:
            try:
                self.destroy(record)
            except (InstanceInUse, CardLost):
                # In use by a process that ended a moment ago, or by one without a lease.
                lingering.append(record)
        return lingering

    # --- observation --------------------------------------------------------------------------------

    def observe(self) -> None:
        """Record which instances somebody else has destroyed, entirely or in part. Raises OSError."""
        for record in [record for record in self._file.records if record.stage == "ready"]:
            try:
                gpu = self._existing(record)
            except CardLost:  # it may come back, with its instances
                continue
            if gpu is None:
                self._store(replace(record, stage="lost"))
            elif record.uuid not in {compute.uuid for compute in gpu.compute}:
                self._store(replace(record, stage="emptying"))

    def _existing(self, record: GpuInstanceRecord) -> GpuInstance | None:
        """Return the GPU instance that a record is about, as the driver lists it now. Raises CardLost."""
        if record.card not in self.geometries or record.stage == "lost":
            return None
        listed = nvml_mig.instances(record.card, self.geometries[record.card])
        return self.existing(record, listed)

    @staticmethod
    def existing(record: GpuInstanceRecord, listed: Iterable[GpuInstance]) -> GpuInstance | None:
        """Return the GPU instance that a record is about, if it exists and is fenka's.

        With a compute instance that fenka cannot have created, the GPU instance is another's.

        listed: all of the record's card.
        """
        if record.stage == "lost":
            return None
        for gpu in listed:
            same = (gpu.profile.name, gpu.start) == (record.profile, record.start)
            if same and not (gpu.compute and record.stage in ("intended", "removing")):
                return gpu
        return None

    # --- records ------------------------------------------------------------------------------------

    def _store(self, record: GpuInstanceRecord) -> GpuInstanceRecord:
        """Add a record, or replace the one of the same generation. Raises OSError."""
        self._write([*self._others(record), record])
        return record

    def _drop(self, record: GpuInstanceRecord) -> None:
        self._write([*self._others(record)])

    def _others(self, record: GpuInstanceRecord) -> Iterator[GpuInstanceRecord]:
        return (other for other in self._file.records if other.generation != record.generation)

    def _write(self, changed: list[GpuInstanceRecord]) -> None:
        changed.sort(key=lambda record: record.generation)
        last = max([self._file.last, *(record.generation for record in changed)])
        file = RecordFile(self.boot, last, changed)
        save(self.path, file)
        self._file = file
