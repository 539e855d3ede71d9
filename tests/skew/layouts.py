"""The layouts that agents share with the libraries inside of running programs.

    python -m tests.skew.layouts > tests/skew/layouts-VERSION.json

writes those of this tree. The file of the last release is committed, and is never written again.
"""

import base64
import sys
from pathlib import Path

import msgspec

from fenka import native
from fenka.isolation import lease_control
from fenka.isolation.lease_control import Control, Limit

PAGE = Control(
    "an-example-of-a-lease",
    (
        Limit("GPU-00000000-0000-0000-0000-000000000001", 4308 << 20, 64 << 20, 30, "hard"),
        Limit("GPU-00000000-0000-0000-0000-000000000002", 1 << 40, 0, 50, "soft"),
        Limit("MIG-00000000-0000-0000-0000-000000000003", 1, 1, 7, "weight"),
    ),
    6,
)


class Layouts(msgspec.Struct):
    """The fields of each struct with offset and bytes, the constants, and PAGE's bytes in base64."""

    fields: dict[str, dict[str, tuple[int, int]]]
    constants: dict[str, int]
    page: str


def layouts() -> Layouts:
    """Return the layouts of this tree."""
    ffi = lease_control.layout()
    structs = [f"struct {name}" for name in ffi.list_types()[1]]
    fields = {
        struct: {
            name: (field.offset, ffi.sizeof(field.type))
            for name, field in ffi.typeof(struct).fields
        }
        for struct in sorted(structs)
    }
    page = base64.b64encode(lease_control.encode(PAGE)).decode()
    return Layouts(fields, native.constants(lease_control.HEADER), page)


def read_layouts(version: str) -> Layouts:
    """Return the layouts of a release."""
    text = Path(__file__).with_name(f"layouts-{version}.json").read_bytes()
    return msgspec.json.decode(text, type=Layouts)


if __name__ == "__main__":
    sys.stdout.write(msgspec.json.format(msgspec.json.encode(layouts()), indent=1).decode() + "\n")
