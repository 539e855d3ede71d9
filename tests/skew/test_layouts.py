"""Control pages and accounts of the last release, whose library running programs keep during an upgrade."""

import base64

from fenka.isolation import lease_control
from tests.skew.layouts import PAGE, layouts, read_layouts
from tests.skew.records import LAST

OLD = read_layouts(LAST)
RESERVED = "reserved"


def test_control_page_of_the_last_release_is_read() -> None:
    """A daemon or node of this release takes over leases whose pages the last one wrote."""
    assert lease_control.decode(base64.b64decode(OLD.page)) == PAGE


def test_control_page_is_written_as_the_last_release_does() -> None:
    """Libraries of the last release refuse a page with another version, or with unknown fields."""
    assert base64.b64encode(lease_control.encode(PAGE)).decode() == OLD.page


def test_fields_are_where_the_last_release_has_them() -> None:
    """New fields take the place of reserved ones. A field that moved needs a new version, and both read."""
    now = layouts().fields
    for struct, fields in OLD.fields.items():
        for name, place in fields.items():
            if not name.startswith(RESERVED):
                assert (struct, name, now[struct].get(name)) == (struct, name, place)
        assert sum(size for _, size in fields.values()) == sum(
            size for _, size in now[struct].values()
        )


def test_constants_are_those_of_the_last_release() -> None:
    """Sizes and bits of identities are parts of the layout, and the versions say that nothing changed."""
    now = layouts().constants
    assert {name: now.get(name) for name in OLD.constants} == OLD.constants
