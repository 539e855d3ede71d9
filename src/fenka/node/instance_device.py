"""A MIG instance as leases record it. Imports little: the relay writes tokens, too."""

import msgspec


class InstanceDevice(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An instance that exists.

    Attributes:
        uuid: the device's. One that is created again at the same place has the same.
        generation: a number that no other instance of the node has.
        compute: in percent of the whole card.
        files: its device files, beside those of its card.
    """

    uuid: str
    generation: int
    compute: int
    files: list[str] = []
