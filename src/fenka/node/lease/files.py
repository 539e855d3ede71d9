"""A lease's files: made in an order that leaves nothing usable half made, taken away in the opposite one.

<root>/TOKEN/lease/     the control page, and empty files where libraries are mounted over
<root>/TOKEN/account/   a small tmpfs of its own, so that a program can fill nothing but it
<cdi>/fenka-TOKEN.json  written last: from then on a container can start with it
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
    """The leases' files of this node. `root` must be a place whose mounts the container runtime sees."""

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
        """The CDI file of this token."""
        return self.cdi / f"{_PREFIX}{token}{_SUFFIX}"

    def control(self, token: str) -> Path:
        """Its control page."""
        return self.root / token / "lease" / "control"

    def slots(self, token: str) -> Path:
        """Its account."""
        return self.root / token / "account" / "slots"

    def complete(self, token: str) -> bool:
        """Whether a container can start with it."""
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
        """Make it, or what is missing of it. What is complete stays as it is: programs may run in it.

        Raises OSError, InvalidControl.
        """
        if self.complete(token):
            return
        self.remove(token)
        directory = self.root / token
        for part in (directory, directory / "lease", directory / "account"):
            part.mkdir(mode=0o755)
        for name in mount_points():
            (directory / "lease" / name).touch(mode=0o644)
        self._mount(directory / "account", account.size())
        limits = [replace(it, memory_mib=lease.limit_mib(it)) for it in lease.slices]
        create_lease(directory, token, limits, contexts_mib, lease.compute)
        content = specification(token, directory, Path(lease.library), driver, lease.environment)
        # The runtime reads every *.json of the directory: the temporary name must not be one.
        write_atomically(self.spec(token), json.dumps(content, indent=1).encode())

    def remove(self, token: str) -> None:
        """Take away what there is of it; nothing happens if there is nothing. Raises OSError."""
        self.spec(token).unlink(missing_ok=True)
        directory = self.root / token
        with contextlib.suppress(FileNotFoundError):
            syscalls.unmount_all(directory / "account", self._unmount)
            shutil.rmtree(directory)

    def orphans(self, known: Collection[str]) -> set[str]:
        """Tokens that have files here and are not in `known`."""
        return {token for token in self._found() if token not in known}

    def libraries(self) -> set[str]:
        """Directories of native libraries that specifications name."""
        text = [path.read_text() for path in self.cdi.glob(f"{_PREFIX}*{_SUFFIX}")]
        return {
            str(Path(mount["hostPath"]).parent)
            for spec in text
            for mount in json.loads(spec)["devices"][0]["containerEdits"]["mounts"]
            if mount["hostPath"].endswith("/libfenka.so")
        }

    def _found(self) -> Iterator[str]:
        for path in self.cdi.glob(f"{_PREFIX}*{_SUFFIX}"):
            yield path.name.removeprefix(_PREFIX).removesuffix(_SUFFIX)
        if self.root.is_dir():
            yield from (path.name for path in self.root.iterdir())
