"""Makes, resizes and removes the files of leases, in an order that never leaves a usable part of a lease.

<root>/TOKEN/lease/     the control page, and empty files where libraries are mounted over
<root>/TOKEN/account/   a small tmpfs, so that a program can fill nothing else
<cdi>/fenka-TOKEN.json  written last: a container can start from then on
"""

import contextlib
import json
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from fenka.core.inventory import DeviceId
from fenka.core.request import Slice
from fenka.dialects.placements import VISIBLE
from fenka.isolation import account, control, resize, syscalls
from fenka.isolation.control import InvalidControl, Limit
from fenka.isolation.files import (
    account_file,
    card_limits,
    control_page,
    create_lease,
    write_atomically,
)
from fenka.node.lease.cdi import ContainerEdits, specification
from fenka.node.lease.sizes import with_limit
from fenka.node.lease.store import Lease

_PREFIX, _SUFFIX = "fenka-", ".json"


@dataclass(frozen=True, slots=True)
class LeaseFiles:
    """The leases' files of this node. The container runtime must see mounts below `root`.

    library: the native libraries, prepared for leases. contexts_mib: context overhead by UUID of a card or
    instance. driver: returns the driver's part of a lease's container edits.
    """

    root: Path
    cdi: Path
    library: Path
    contexts_mib: Mapping[str, int]
    driver: Callable[[Lease], ContainerEdits]
    mount: Callable[[Path, int], None] = syscalls.mount_small
    unmount: Callable[[Path], None] = syscalls.unmount

    def prepare(self) -> None:
        """Make the directories."""
        self.root.mkdir(parents=True, exist_ok=True, mode=0o755)
        self.cdi.mkdir(parents=True, exist_ok=True, mode=0o755)

    def spec(self, token: str) -> Path:
        """Return the path of a token's CDI specification."""
        return self.cdi / f"{_PREFIX}{token}{_SUFFIX}"

    def control(self, token: str) -> Path:
        """Return the path of a token's control page."""
        return control_page(self.root / token)

    def slots(self, token: str) -> Path:
        """Return the path of a token's account."""
        return account_file(self.root / token)

    def is_complete(self, token: str) -> bool:
        """Return whether a container can start with the token's lease."""
        return (
            self.spec(token).exists()
            and self.control(token).exists()
            and self.slots(token).exists()
        )

    def make(self, token: str, lease: Lease) -> None:
        """Make the files of a lease. A complete lease stays as it is, since programs may run in it.

        Raises OSError, InvalidControl, NoDriverFiles.
        """
        if self.is_complete(token):
            return
        driver = self.driver(lease)
        self.remove(token)
        directory = self.root / token
        for part in (directory, directory / "lease", directory / "account"):
            part.mkdir(mode=0o755)
        self.mount(directory / "account", account.size())
        create_lease(directory, token, self._limits(lease, lease.slices))
        environment = lease.environment
        if lease.instances:
            environment = {**environment, VISIBLE: ",".join(lease.devices)}
        content = specification(token, directory, Path(lease.library), driver, environment)
        # The runtime reads every *.json of the directory. The temporary file has another suffix.
        write_atomically(self.spec(token), json.dumps(content, indent=1).encode())

    def in_force(self, token: str, lease: Lease) -> list[Slice]:
        """Return what the lease's programs may use now. Raises OSError, InvalidControl."""
        if lease.limits_mib:  # Its node does not isolate.
            return list(lease.slices)
        page = self.control(token)
        limits = control.read_interrupted(page).limits
        if [limit.uuid for limit in limits] != lease.devices:
            raise InvalidControl(f"{page}: has other cards than its lease")
        return [
            with_limit(piece, limit, lease.device_compute(piece))
            for piece, limit in zip(lease.slices, limits, strict=True)
        ]

    def check(
        self, token: str, lease: Lease, before: Sequence[Slice], after: Sequence[Slice]
    ) -> None:
        """Check that programs hold no more than is left. Raises InUse, OSError, InvalidAccount."""
        limits = self._limits(lease, before), self._limits(lease, after)
        resize.check(self.slots(token), *limits)

    def enforce(self, token: str, lease: Lease, slices: Sequence[Slice]) -> None:
        """Put slices in force for running programs. Raises InUse, OSError, InvalidControl, InvalidAccount."""
        resize.resize(self.control(token), self.slots(token), self._limits(lease, slices))

    def _limits(self, lease: Lease, slices: Sequence[Slice]) -> tuple[Limit, ...]:
        lease = msgspec.structs.replace(lease, slices=list(slices))
        limited = [
            replace(piece, uuid=DeviceId(lease.device(piece)), memory_mib=lease.limit_mib(piece))
            for piece in slices
        ]
        compute = {lease.device(piece): lease.device_compute(piece) for piece in slices}
        return card_limits(limited, self.contexts_mib, lease.compute, compute.__getitem__)

    def remove(self, token: str) -> None:
        """Remove the files of a token, if there are any. Raises OSError."""
        self.spec(token).unlink(missing_ok=True)
        directory = self.root / token
        with contextlib.suppress(FileNotFoundError):
            syscalls.unmount_all(directory / "account", self.unmount)
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
