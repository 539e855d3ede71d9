"""Makes the certificates of fenka's servers on a cluster. Pure except for randomness.

An authority of fenka's own signs one certificate each for the extender's replicas and kube-scheduler. They
trust no other authority, so a certificate of this one is sufficient.
"""

import ipaddress
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from fenka.server import certificate_files

YEAR = timedelta(days=365)
AUTHORITY_LASTS = 10 * YEAR
SERVER_LASTS = YEAR
"""Renewed automatically, and reloaded by running replicas."""
CLIENT_LASTS = AUTHORITY_LASTS
"""Copied to control planes by hand: if it expired earlier, scheduling would stop unexpectedly."""
RENEW_BELOW = 1 / 3
"""A certificate is renewed when less than this part of its lifetime is left."""
CLOCKS = timedelta(hours=1)
"""The clocks of two machines may differ by this."""

LOCAL = ("localhost", "127.0.0.1", "::1")
"""kube-scheduler reaches a NodePort there."""


@dataclass(frozen=True, slots=True)
class Leaf:
    """The extensions of a certificate that is no authority's. hosts: a server's names; None for a client."""

    common_name: str
    hosts: Sequence[x509.GeneralName] | None
    lasts: timedelta


def due(
    existing: Mapping[str, certificate_files.Pair | None], hosts: Sequence[str], now: datetime
) -> dict[str, certificate_files.Pair]:
    """Make the pairs that are missing, invalid or expire soon, by name (AUTHORITY, SERVER, CLIENT).

    Args:
        existing: the pairs that exist, by name.
        hosts: names and addresses by which the extender is called.
        now: with its time zone.
    """
    made: dict[str, certificate_files.Pair] = {}
    authority = existing.get(certificate_files.AUTHORITY)
    if authority is None or _left(authority, now) <= 0:
        authority = made[certificate_files.AUTHORITY] = new_authority(now)
    leaves = {
        certificate_files.SERVER: Leaf(certificate_files.SERVER_NAME, names(hosts), SERVER_LASTS),
        certificate_files.CLIENT: Leaf(certificate_files.CLIENT_NAME, None, CLIENT_LASTS),
    }
    for name, leaf in leaves.items():
        pair = existing.get(name)
        if pair is None or not _is_valid(pair, authority, leaf.hosts, now):
            made[name] = new_leaf(authority, leaf, now)
    return made


def names(hosts: Sequence[str]) -> list[x509.GeneralName]:
    """Return the subject alternative names of the extender, in this order and without duplicates."""
    return [
        _general(host) for host in dict.fromkeys((certificate_files.SERVER_NAME, *hosts, *LOCAL))
    ]


def new_authority(now: datetime) -> certificate_files.Pair:
    """Make a certificate authority."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "fenka certificate authority")])
    builder = (
        _builder(name, name, key, now, now + AUTHORITY_LASTS)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(signs=True), critical=True)
    )
    return _pair(builder.sign(key, hashes.SHA256()), key)


def new_leaf(
    authority: certificate_files.Pair, leaf: Leaf, now: datetime
) -> certificate_files.Pair:
    """Make the certificate of a server or a client."""
    issuer, issuer_key = _read(authority)
    key = ec.generate_private_key(ec.SECP256R1())
    # A common name has at most 64 characters, and a Service with its namespace may have more.
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, leaf.common_name[:64])])
    until = min(now + leaf.lasts, issuer.not_valid_after_utc)
    is_client = leaf.hosts is None
    purpose = ExtendedKeyUsageOID.CLIENT_AUTH if is_client else ExtendedKeyUsageOID.SERVER_AUTH
    builder = (
        _builder(name, issuer.subject, key, now, until)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(signs=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage([purpose]), critical=False)
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_public_key(issuer_key.public_key()),
            critical=False,
        )
    )
    if leaf.hosts is not None:
        builder = builder.add_extension(x509.SubjectAlternativeName(leaf.hosts), critical=False)
    return _pair(builder.sign(issuer_key, hashes.SHA256()), key)


def expiry(pair: certificate_files.Pair) -> datetime:
    """Return when the certificate expires. Raises InvalidPair."""
    return _read(pair)[0].not_valid_after_utc


def _is_valid(
    pair: certificate_files.Pair,
    authority: certificate_files.Pair,
    hosts: Sequence[x509.GeneralName] | None,
    now: datetime,
) -> bool:
    if _left(pair, now) < RENEW_BELOW:
        return False
    certificate, _ = _read(pair)
    try:
        certificate.verify_directly_issued_by(_read(authority)[0])
        if hosts is None:
            return True
        extension = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName)
    except (InvalidSignature, ValueError, TypeError, x509.ExtensionNotFound):
        return False
    return set(extension.value) == set(hosts)


def _left(pair: certificate_files.Pair, now: datetime) -> float:
    """Return the part of the certificate's lifetime that is left; 0 for an invalid pair."""
    try:
        certificate, _ = _read(pair)
    except certificate_files.InvalidPair:
        return 0.0
    begins, ends = certificate.not_valid_before_utc, certificate.not_valid_after_utc
    return max((ends - now) / (ends - begins), 0.0)


def _read(pair: certificate_files.Pair) -> tuple[x509.Certificate, ec.EllipticCurvePrivateKey]:
    try:
        certificate = x509.load_pem_x509_certificate(pair.certificate)
        key = serialization.load_pem_private_key(pair.key, password=None)
    except (ValueError, TypeError) as why:
        raise certificate_files.InvalidPair(str(why)) from None
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise certificate_files.InvalidPair("its key is not an elliptic-curve key")
    if key.public_key() != certificate.public_key():
        raise certificate_files.InvalidPair("its key belongs to another certificate")
    return certificate, key


def _builder(
    subject: x509.Name,
    issuer: x509.Name,
    key: ec.EllipticCurvePrivateKey,
    now: datetime,
    until: datetime,
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - CLOCKS)
        .not_valid_after(until)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    )


def _usage(*, signs: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs,
        key_cert_sign=signs,
        crl_sign=signs,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _pair(certificate: x509.Certificate, key: ec.EllipticCurvePrivateKey) -> certificate_files.Pair:
    pem = serialization.Encoding.PEM
    secret = key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    return certificate_files.Pair(certificate.public_bytes(pem), secret)


def _general(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)
