"""Records and messages of the last release are read by this one, and back.

Releases next to each other run side by side during an upgrade, and after a rollback the older one reads what
the newer one has written.
"""

from typing import Any

import msgspec
import pytest

from tests.skew.records import ALL, LAST, STORED, decode, encoded, read_samples, samples

IGNORED = {
    *("container_id", "engine", "restarted"),
    *("allow_unlimited_drivers", "blocked", "problem", "problems", "unlisted"),
    *("busy", "cordoned", "free_mib", "helps", "last_active", "power_limit_w", "power_w"),
    *("linked", "links", "near", "node_server", "refusals", "starts", "temperature_c"),
    *("topology_levels", "xids"),
}
"""New fields of records in which the last release ignores unknown fields."""

SAMPLES = read_samples(LAST)


def known(value: Any) -> Any:
    """Return what the last release takes of a record: all but the fields that it ignores."""
    match value:
        case dict():
            return {name: known(part) for name, part in value.items() if name not in IGNORED}
        case list():
            return [known(part) for part in value]
    return value


@pytest.mark.parametrize("name", SAMPLES)
def test_record_of_the_last_release_is_read_and_written_as_that_release_does(name: str) -> None:
    """A field that is new must not be written while it has its default, unless the old release ignores it."""
    record = decode(name, SAMPLES[name].full)
    assert known(encoded(record)) == SAMPLES[name].full


@pytest.mark.parametrize("name", [name for name in SAMPLES if name != "workstation/state"])
def test_record_without_optional_fields_is_read(name: str) -> None:
    """A field that the last release could leave out stays optional."""
    written = known(encoded(decode(name, SAMPLES[name].least)))
    full = SAMPLES[name].full
    if isinstance(written, dict):
        # Defaults are written, or left out, but never under a name that the last release does not know.
        assert set(written) <= set(full)


def test_all_formats_of_the_last_release_are_still_known() -> None:
    """A format that goes needs a release that still reads it."""
    assert set(SAMPLES) <= set(ALL)


@pytest.mark.parametrize("name", ALL)
def test_samples_set_all_fields(name: str) -> None:
    """Samples prove nothing of fields that they do not have, so made-up ones are read back unchanged."""
    full = samples()[name].full
    assert encoded(decode(name, full)) == full


@pytest.mark.parametrize("name", sorted(STORED))
def test_unknown_field_of_a_record_is_refused_or_ignored_but_never_changes_another(
    name: str,
) -> None:
    """After a rollback a record may have fields of the newer release."""
    full = SAMPLES[name].full
    if not isinstance(full, dict):
        pytest.skip("it is a list")
    try:
        record = decode(name, {**full, "fieldOfTheFuture": 1})
    except msgspec.MsgspecError as why:
        assert "fieldOfTheFuture" in str(why)  # noqa: PT017
    else:
        assert known(encoded(record)) == full
