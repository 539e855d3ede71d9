"""Makes and removes the files of leases, in an order that never leaves a usable part of a lease.

<root>/TOKEN/lease/     the control page, and empty files where libraries are mounted over
<root>/TOKEN/account/   a small tmpfs, so that a program can fill nothing else
<cdi>/fenka-TOKEN.json  written last: a container can start from then on
"""

import contextlib
import json
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from fenka.isolation import account, syscalls
from fenka.isolation.files import create_lease, write_atomically
from fenka.node.lease.cdi import ContainerEdits, mount_points, specification
from fenka.node.lease.store import Lease

_PREFIX, _SUFFIX = "fenka-", ".json"


class LeaseFiles:
    """The leases' files of this node. The container runtime must see mounts below `root`."""

    def __init__(
        self,
        root: Path,
        cdi: Path,
        mount: Callable[[Path, int], None] = syscalls.mount_small,
        unmount: Callable[[Path], None] = syscalls.unmount,
    ) -> None:
        self.root, self.cdi = root, cdi
        self._mount, self._unmount = mount, unmount

    def prepare(self) -> None:
        """Make the directories."""
        self.root.mkdir(parents=True, exist_ok=True, mode=0o755)
        self.cdi.mkdir(parents=True, exist_ok=True, mode=0o755)

    def spec(self, token: str) -> Path:
        """Return the path of a token's CDI specification."""
        return self.cdi / f"{_PREFIX}{token}{_SUFFIX}"

    def control(self, token: str) -> Path:
        """Return the path of a token's control page."""
        return self.root / token / "lease" / "control"

    def slots(self, token: str) -> Path:
        """Return the path of a token's account."""
        return self.root / token / "account" / "slots"

    def is_complete(self, token: str) -> bool:
        """Return whether a container can start with the token's lease."""
        return (
            self.spec(token).exists()
            and self.control(token).exists()
            and self.slots(token).exists()
        )

    def make(
        self,
        token: str,
        lease: Lease,
        contexts_mib: Mapping[str, int],
        driver: ContainerEdits,
    ) -> None:
        """Make the files of a lease. A complete lease stays as it is, since programs may run in it.

        Raises OSError, InvalidControl.
        """
        if self.is_complete(token):
            return
        self.remove(token)
        directory = self.root / token
        for part in (directory, directory / "lease", directory / "account"):
            part.mkdir(mode=0o755)
        for name in mount_points():
            (directory / "lease" / name).touch(mode=0o644)
        self._mount(directory / "account", account.size())
        limits = [replace(piece, memory_mib=lease.limit_mib(piece)) for piece in lease.slices]
        create_lease(directory, token, limits, contexts_mib, lease.compute)
        content = specification(token, directory, Path(lease.library), driver, lease.environment)
        # The runtime reads every *.json of the directory. The temporary file has another suffix.
        write_atomically(self.spec(token), json.dumps(content, indent=1).encode())

    def remove(self, token: str) -> None:
        """Remove the files of a token, if there are any. Raises OSError."""
        self.spec(token).unlink(missing_ok=True)
        directory = self.root / token
        with contextlib.suppress(FileNotFoundError):
            syscalls.unmount_all(directory / "account", self._unmount)
            shutil.rmtree(directory)

    def orphans(self, known: Collection[str]) -> set[str]:
        """Return the tokens that have files but are not in `known`."""
        return {token for token in self._tokens() if token not in known}

    def libraries(self) -> set[str]:
        """Return the directories of native libraries that specifications name."""
        specifications = [path.read_text() for path in self.cdi.glob(f"{_PREFIX}*{_SUFFIX}")]
        return {
            str(Path(mount["hostPath"]).parent)
            for spec in specifications
            for mount in json.loads(spec)["devices"][0]["containerEdits"]["mounts"]
            if mount["hostPath"].endswith("/libfenka.so")
        }

    def _tokens(self) -> Iterator[str]:
        for path in self.cdi.glob(f"{_PREFIX}*{_SUFFIX}"):
            yield path.name.removeprefix(_PREFIX).removesuffix(_SUFFIX)
        if self.root.is_dir():
            yield from (path.name for path in self.root.iterdir())
