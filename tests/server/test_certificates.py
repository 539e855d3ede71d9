"""The certificates of an installation: made once, renewed in time, and kept otherwise."""

from datetime import UTC, datetime, timedelta

import pytest
from cryptography import x509

from fenka.server.certificate_files import AUTHORITY, CLIENT, SERVER, InvalidPair, Pair
from fenka.server.certificates import (
    AUTHORITY_LASTS,
    CLOCKS,
    SERVER_LASTS,
    due,
    expiry,
    new_authority,
)

NOW = datetime(2026, 1, 1, tzinfo=UTC)
HOSTS = ("fenka-scheduler.gpu.svc", "10.0.0.1")
ALL = {AUTHORITY, SERVER, CLIENT}


def made(now: datetime = NOW) -> dict[str, Pair]:
    """Return all three pairs."""
    return due({}, HOSTS, now)


def test_pairs_are_made_once_when_none_exists() -> None:
    """A second run makes none."""
    found = made()
    assert set(found) == ALL
    assert due(found, HOSTS, NOW) == {}
    assert due(found, HOSTS, NOW + SERVER_LASTS / 2) == {}


def test_only_the_server_is_renewed_when_it_expires_soon() -> None:
    """Copies of the client's certificate on control planes stay valid."""
    found, later = made(), NOW + SERVER_LASTS * 0.8
    renewed = due(found, HOSTS, later)
    assert set(renewed) == {SERVER}
    assert expiry(renewed[SERVER]) == later + SERVER_LASTS
    assert due(found | renewed, HOSTS, later) == {}


def test_all_pairs_are_made_again_when_the_authority_has_expired() -> None:
    """That is after ten years; no certificate outlives its authority."""
    found = made()
    end = expiry(found[AUTHORITY])
    assert end == NOW + AUTHORITY_LASTS == expiry(found[CLIENT])
    assert expiry(due(found, HOSTS, end - timedelta(days=30))[SERVER]) == end
    assert set(due(found, HOSTS, end + CLOCKS)) == ALL


def test_server_is_renewed_when_its_names_change() -> None:
    """Their order does not matter."""
    found = made()
    assert due(found, HOSTS[::-1], NOW) == {}
    renewed = due(found, (*HOSTS, "gpu.example.com"), NOW)
    assert set(renewed) == {SERVER}
    certificate = x509.load_pem_x509_certificate(renewed[SERVER].certificate)
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == [
        "fenka-scheduler",
        "fenka-scheduler.gpu.svc",
        "gpu.example.com",
        "localhost",
    ]
    assert [str(it) for it in names.get_values_for_type(x509.IPAddress)] == [
        "10.0.0.1",
        "127.0.0.1",
        "::1",
    ]


@pytest.mark.parametrize("name", sorted(ALL))
def test_pair_is_made_again_when_it_is_invalid(name: str) -> None:
    """Half a Secret, a key of another certificate, another authority's certificate."""
    found, other = made(), made()
    broken = (
        Pair(b"", b""),
        Pair(found[name].certificate, other[name].key),
        Pair(found[name].certificate, b"-----BEGIN"),
    )
    again = ALL if name == AUTHORITY else {name}
    for pair in broken:
        assert set(due(found | {name: pair}, HOSTS, NOW)) == again
        with pytest.raises(InvalidPair):
            expiry(pair)
    foreign = due(found | {name: other[name]}, HOSTS, NOW)
    assert set(foreign) == (ALL - {AUTHORITY} if name == AUTHORITY else {name})


def test_authority_cannot_sign_another_authority() -> None:
    """Its path length is 0."""
    certificate = x509.load_pem_x509_certificate(new_authority(NOW).certificate)
    constraints = certificate.extensions.get_extension_for_class(x509.BasicConstraints)
    assert (constraints.value.ca, constraints.value.path_length) == (True, 0)
