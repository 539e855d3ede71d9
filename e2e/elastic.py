"""Start and end machines while the cluster runs, as the command of a cloud's provider does.

    python -m e2e.elastic STATE start ID GROUP TYPE ZONE
    python -m e2e.elastic STATE end ID
    python -m e2e.elastic STATE configure GROUP LABEL=VALUE…

The last one sets which labels the nodes of fenka's simulated cloud have. The others return at once and may be
repeated, also after they were killed. A file says whether an instance is wanted, and a process in the
background follows it. The Node object is not deleted: no cloud does that.
"""

import fcntl
import json
import shutil
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from e2e.cluster import SPARES, Cluster, Node, NodeSpec
from e2e.machine import ClusterError, wait_until
from e2e.network import run_ip_batch
from e2e.programs import exclusive_lock
from e2e.supervisor import REPOSITORY

STARTS_AT_A_TIME = 2
ATTEMPTS = 3
SETTINGS = "settings"


@dataclass(frozen=True)
class Group:
    """What the nodes of a group are.

    Attributes:
        labels: the kubelet registers its node with these.
        joins: False if its machines never start; clouds sell such ones, too.
    """

    labels: dict[str, str] = field(default_factory=dict)
    joins: bool = True


@dataclass(frozen=True)
class Instance:
    """An instance as its cloud wants it. number: selects its address."""

    id: str
    group: str
    type: str
    zone: str
    number: int
    wanted: bool = True


class Instances:
    """The records of a cluster's instances, in its state directory."""

    def __init__(self, state: Path) -> None:
        self.state = state.resolve()
        self.folder = self.state / "elastic"

    def configure(self, groups: Mapping[str, Group], provider_id: str) -> None:
        """Set what the nodes of each group are. provider_id: may contain {id} and {zone}."""
        written = {name: asdict(group) for name, group in groups.items()}
        self._write(SETTINGS, {"groups": written, "provider_id": provider_id})

    def group(self, instance: Instance) -> Group:
        """Return what the nodes of an instance's group are."""
        return Group(**self._settings()["groups"][instance.group])

    def flags(self, instance: Instance) -> tuple[str, ...]:
        """Return the kubelet's flags for an instance."""
        labels = self.group(instance).labels | {
            "topology.kubernetes.io/zone": instance.zone,
            "node.kubernetes.io/instance-type": instance.type,
        }
        listed = ",".join(f"{key}={value}" for key, value in labels.items())
        provider_id = self._settings()["provider_id"].format(id=instance.id, zone=instance.zone)
        return f"--node-labels={listed}", f"--provider-id={provider_id}"

    def start(self, name: str, group: str, kind: str, zone: str) -> None:
        """Want an instance, unless it was wanted before."""
        with exclusive_lock(self.folder / "records.lock"):
            if self.read(name) is None:
                used = {each.number for each in self.all()}
                number = next((each for each in SPARES if each not in used), None)
                if number is None:
                    raise ClusterError(f"there are no more than {len(SPARES)} machines to start")
                self._write(name, asdict(Instance(name, group, kind, zone, number)))

    def end(self, name: str) -> None:
        """Want an instance no longer. One that is gone is no error."""
        with exclusive_lock(self.folder / "records.lock"):
            instance = self.read(name)
            if instance is not None:
                self._write(name, asdict(replace(instance, wanted=False)))

    def read(self, name: str) -> Instance | None:
        """Return an instance, None if it is gone."""
        try:
            return Instance(**json.loads((self.folder / f"{name}.json").read_text()))
        except FileNotFoundError:
            return None

    def all(self) -> list[Instance]:
        """Return all instances that are not gone."""
        files = self.folder.glob("*.json")
        names = sorted(each.stem for each in files if each.stem != SETTINGS)
        return [each for each in map(self.read, names) if each is not None]

    def forget(self, name: str) -> None:
        """Remove the record of an instance that is gone."""
        (self.folder / f"{name}.json").unlink(missing_ok=True)

    def following(self, name: str) -> AbstractContextManager[None]:
        """Exclude other processes that follow this instance."""
        return exclusive_lock(self.folder / f"{name}.lock")

    @contextmanager
    def starting(self) -> Iterator[None]:
        """Wait until few enough machines start."""
        places = [self.folder / f"place-{number}.lock" for number in range(STARTS_AT_A_TIME)]
        files = [place.open("w") for place in places]
        try:
            while not any(map(_try_lock, files)):
                time.sleep(0.1)
            yield
        finally:
            for file in files:
                file.close()

    def _settings(self) -> Any:
        return json.loads((self.folder / f"{SETTINGS}.json").read_text())

    def _write(self, name: str, document: Mapping[str, Any]) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        fresh = self.folder / f"{name}.new"
        fresh.write_text(json.dumps(document))
        fresh.replace(self.folder / f"{name}.json")


def _try_lock(file: Any) -> bool:
    with suppress(BlockingIOError):
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    return False


class Follower:
    """Brings one instance's machine into the state that its record asks for."""

    def __init__(self, instances: Instances, name: str) -> None:
        self._instances, self._name = instances, name

    def run(self) -> None:
        """Start or end the machine; return when that is done."""
        with self._instances.following(self._name):
            for _ in range(ATTEMPTS):
                instance = self._instances.read(self._name)
                if instance is None:
                    return
                try:
                    if self._follow(instance):
                        return
                except (ClusterError, OSError, subprocess.CalledProcessError):
                    traceback.print_exc()

    def _follow(self, instance: Instance) -> bool:
        """Do what is wanted now. Return whether that is still what is wanted."""
        node = node_of(self._instances, instance)
        done = self._instances.folder / f"{self._name}.done"
        if not instance.wanted:
            remove(node)
            done.unlink(missing_ok=True)
            self._instances.forget(self._name)
        elif self._instances.group(instance).joins and not (done.exists() and node.is_on()):
            with self._instances.starting():
                if self._is_wanted():
                    remove(node)
                    self._start(node)
            done.touch()
        return instance.wanted == self._is_wanted()

    def _start(self, node: Node) -> None:
        cluster = node.cluster
        with exclusive_lock(self._instances.folder / "certificates.lock"):
            cluster.make_node_certificates(NodeSpec(node.name, node.address))
        node.power_on(cluster.owner)
        node.connect()
        node.prepare()
        node.start_kubelet()
        # Until then it needs the processor, and others that start would be slower.
        wait_until(f"{node.name}: Ready", lambda: not self._is_wanted() or node.is_ready())

    def _is_wanted(self) -> bool:
        instance = self._instances.read(self._name)
        # A cluster that is taken down does not wait for a machine.
        is_up = (self._instances.state / "layout.json").exists()
        return instance is not None and instance.wanted and is_up


def node_of(instances: Instances, instance: Instance) -> Node:
    """Return the machine of an instance."""
    cluster = Cluster.attach(instances.state)
    address = cluster.layout.spare_address(instance.number)
    flags = instances.flags(instance)
    return Node(cluster, NodeSpec(instance.id, address), instance.number, flags)


def remove(node: Node) -> None:
    """End a machine, and remove everything of it but its logs."""
    node.power_off()
    with suppress(ClusterError):
        run_ip_batch(node.cluster.control_plane, f"link delete node{node.number}")
    shutil.rmtree(node.files.folder, ignore_errors=True)
    pki = node.cluster.state / "pki"
    for stem in (f"kubelet-{node.name}", f"kubelet-serving-{node.name}"):
        for path in pki.glob(f"{stem}.*"):
            path.unlink()


def follow_in_background(instances: Instances, name: str) -> None:
    """Follow an instance in a process of its own, which outlives this one."""
    logs = instances.state / "logs" / name
    logs.mkdir(parents=True, exist_ok=True)
    with (logs / "elastic.log").open("ab") as output:
        subprocess.Popen(
            [sys.executable, "-m", "e2e.elastic", str(instances.state), "follow", name],
            cwd=REPOSITORY,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def main(arguments: list[str]) -> int:
    """Run one command; return its exit code."""
    match arguments:
        case [state, "start", name, group, kind, zone]:
            Instances(Path(state)).start(name, group, kind, zone)
        case [state, "end", name]:
            Instances(Path(state)).end(name)
        case [state, "configure", group, *labels]:
            pairs = dict(label.split("=", 1) for label in labels)
            Instances(Path(state)).configure({group: Group(pairs)}, "simulated:///{zone}/{id}")
            return 0
        case [state, "follow", name]:
            Follower(Instances(Path(state)), name).run()
            return 0
        case _:
            print(__doc__, file=sys.stderr)
            return 2
    follow_in_background(Instances(Path(state)), name)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
