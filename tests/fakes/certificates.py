"""Certificates in a directory, as the chart mounts them."""

from datetime import UTC, datetime
from pathlib import Path

from fenka.scheduler.leader_proxy import Credentials
from fenka.scheduler.server import Access
from fenka.server.certificate_files import AUTHORITY, CLIENT, SERVER, Pair
from fenka.server.certificates import due


def write(directory: Path, pairs: dict[str, Pair]) -> Path:
    """As files."""
    directory.mkdir(exist_ok=True)
    (directory / "ca.crt").write_bytes(pairs[AUTHORITY].certificate)
    for name in (SERVER, CLIENT):
        (directory / f"{name}.crt").write_bytes(pairs[name].certificate)
        (directory / f"{name}.key").write_bytes(pairs[name].key)
    return directory


def fresh(directory: Path) -> Credentials:
    """Of an authority of their own."""
    return Credentials(write(directory, due({}, (), datetime.now(UTC))))


def access(directory: Path) -> Access:
    """Of a server with such certificates."""
    return Access(credentials=fresh(directory))
