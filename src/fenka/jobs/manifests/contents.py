"""Contents: what a submission carries besides its spec, read or made once when it is submitted."""

from collections.abc import Mapping
from dataclasses import dataclass, field

GIT_USERNAME = "GIT_SYNC_USERNAME"
GIT_PASSWORD = "GIT_SYNC_PASSWORD"
GIT_CREDENTIALS = (GIT_USERNAME, GIT_PASSWORD)
"""Variables that are kept in a Secret: neither pods nor annotations show them."""


@dataclass(frozen=True, slots=True)
class Contents:
    """Files and secrets of a submission.

    Attributes:
        key: Secret of the launch agents, in hexadecimal digits.
        ssh_keys: Private and public key for images without Python; empty without.
        code: The archive of `--code`; empty without.
        config_files: Files by their paths in the pods.
        revision: The commit that all processes and restarts run; empty if it could not be found out.
        credentials: git's user name and password, by the names of their variables.
    """

    key: str = ""
    ssh_keys: tuple[str, str] | None = None
    code: bytes = b""
    config_files: Mapping[str, bytes] = field(default_factory=dict)
    revision: str = ""
    credentials: Mapping[str, str] = field(default_factory=dict)
