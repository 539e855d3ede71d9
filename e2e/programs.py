"""Build the cluster's programs once into a cache, keyed by the hash of their sources.

``python3 e2e/programs.py`` builds the missing ones. It needs only Go, so that it can run before anything is
set up. A second run waits for the first.
"""

import fcntl
import functools
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

HERE = Path(__file__).parent
KUBERNETES = (
    "etcd",
    "kube-apiserver",
    "kube-controller-manager",
    "kube-scheduler",
    "kube-proxy",
    "kubelet",
    "kubectl",
)
COMPLETE = "complete"


class BuildError(Exception):
    """A program could not be built; the text names the log."""


@dataclass(frozen=True)
class Module:
    """A folder with a go.mod, the packages built from it, and the version variables set by the linker."""

    name: str
    packages: tuple[str, ...]
    stamps: tuple[tuple[str, str], ...]
    links: tuple[str, ...] = ()
    modfile: str = field(default="go.mod", repr=False)
    """The file that is its go.mod. Another one has the same source, at other versions of its modules."""
    cgo_tags: str | None = field(default=None, repr=False)
    """Tags of the build, where it needs a C compiler."""

    @property
    def folder(self) -> Path:
        """The folder of go.mod."""
        return HERE / self.name

    def version(self, module: str) -> str:
        """Return the version of a Go module that go.mod pins."""
        match = re.search(rf"^\s*{re.escape(module)} (v\S+)", self.go_mod(), re.MULTILINE)
        if not match:
            raise BuildError(f"{self.folder}/{self.modfile} requires no {module}")
        return match[1]

    def go_mod(self) -> str:
        """Return the text of go.mod."""
        return (self.folder / self.modfile).read_text()

    def linker_flags(self) -> str:
        """Return the linker flags that set the versions; programs would report a development version."""
        flags = ["-s", "-w"]
        for variable, module in self.stamps:
            version = self.version(module)
            flags += ["-X", f"{variable}={version}"]
            if variable.endswith(".gitVersion"):
                package = variable.removesuffix(".gitVersion")
                major, minor = version.removeprefix("v").split(".")[:2]
                flags += ["-X", f"{package}.gitMajor={major}", "-X", f"{package}.gitMinor={minor}"]
        return " ".join(flags)

    def key(self) -> str:
        """Return a hash of everything that goes into the build."""
        digest = hashlib.sha256()
        for part in [
            go("env", "GOVERSION", "GOARCH"),
            self.linker_flags(),
            repr(self) + (self.cgo_tags or ""),
        ]:
            digest.update(part.encode() + b"\0")
        own = {self.modfile, self.modfile.replace(".mod", ".sum")}
        for source in sorted(self.folder.rglob("*")):
            if source.name in own or source.suffix == ".go":
                digest.update(source.name.encode() + b"\0" + source.read_bytes())
        return digest.hexdigest()[:16]

    def directory(self) -> Path:
        """Return the folder in the cache for its programs."""
        name = self.name if self.modfile == "go.mod" else Path(self.modfile).stem
        return cache() / f"{name}-{self.key()}"

    def lock(self) -> Path:
        """Return the file that is locked while the programs are built."""
        folder = self.directory()
        return folder.with_name(f"{folder.name}.lock")

    def source(self, module: str) -> Path:
        """Return the folder in Go's cache with the files of a module that go.mod requires."""
        return Path(json.loads(go("mod", "download", "-json", module, folder=self.folder))["Dir"])


MODULES = (
    Module(
        "cluster",
        (".", "tool"),
        (
            ("k8s.io/component-base/version.gitVersion", "k8s.io/kubernetes"),
            ("k8s.io/client-go/pkg/version.gitVersion", "k8s.io/kubernetes"),
            (
                "github.com/containerd/containerd/v2/version.Version",
                "github.com/containerd/containerd/v2",
            ),
        ),
        KUBERNETES,
    ),
    Module(
        "helm",
        ("tool",),
        (("helm.sh/helm/v4/internal/version.version", "helm.sh/helm/v4"),),
    ),
    Module("coredns", ("fenka.io/e2e/coredns",), ()),
    Module(
        "jobset",
        ("tool",),
        (("sigs.k8s.io/jobset/pkg/version.GitVersion", "sigs.k8s.io/jobset"),),
    ),
)

OWN = MODULES[0]
"""The cluster's own version of Kubernetes, with containerd and the CNI plugins for every version."""


def kubernetes(version: str) -> Module:
    """Return Kubernetes of a minor version, such as "1.33". Raise BuildError if there is none."""
    if re.fullmatch(rf"v{re.escape(version)}\.\d+", OWN.version("k8s.io/kubernetes")):
        return OWN
    modfile = f"{version}.mod"
    if not (OWN.folder / modfile).exists():
        others = (path.stem for path in OWN.folder.glob("[0-9]*.mod"))
        raise BuildError(
            f"FENKA_E2E_KUBERNETES={version}: the tests have no such version; choose "
            f"{', '.join(sorted(others))}, or leave it out"
        )
    return Module(OWN.name, (".",), OWN.stamps[:2], KUBERNETES, modfile)


CONTAINERD = Module(
    "containerd",
    ("tool",),
    (
        (
            "github.com/containerd/containerd/version.Version",
            "github.com/containerd/containerd",
        ),
    ),
)
"""containerd 1.7, which FENKA_E2E_CONTAINERD=1.7 chooses instead of the cluster's."""

CNI = Module("cni", ("tool",), ())
"""The CNI plugins of containerd 1.7, which needs one more than containerd 2."""

HELM = MODULES[1]
"""The helm of the tests."""

HELM_3 = Module(
    HELM.name,
    ("tool",),
    (("helm.sh/helm/v3/internal/version.version", "helm.sh/helm/v3"),),
    modfile="helm3.mod",
)
"""helm 3, which FENKA_E2E_HELM=3 chooses instead."""


def chosen_kubernetes() -> Module:
    """Return the Kubernetes that FENKA_E2E_KUBERNETES names, or the cluster's own."""
    version = os.environ.get("FENKA_E2E_KUBERNETES")
    return kubernetes(version) if version else OWN


def minor() -> int:
    """Return the minor version of the Kubernetes that was chosen: 37 for 1.37."""
    return int(chosen_kubernetes().version("k8s.io/kubernetes").split(".")[1])


def chosen_containerd() -> Module:
    """Return the module of the containerd that FENKA_E2E_CONTAINERD names, or the cluster's own."""
    return _named("FENKA_E2E_CONTAINERD", {"1.7": CONTAINERD, "2": OWN})


def chosen_helm() -> Module:
    """Return the helm that FENKA_E2E_HELM names, or the newest."""
    return _named("FENKA_E2E_HELM", {"3": HELM_3, "4": HELM})


def _named(variable: str, modules: Mapping[str, Module]) -> Module:
    """Return the module whose version an environment variable has; without it, the last."""
    version = os.environ.get(variable) or [*modules][-1]
    if version not in modules:
        raise BuildError(
            f"{variable}={version}: the tests have no such version; choose {' or '.join(modules)}"
        )
    return modules[version]


def chosen() -> tuple[Module, ...]:
    """Return the modules that a run needs. What an earlier one has is found first."""
    runtime = chosen_containerd()
    network = () if runtime is OWN else (CNI,)
    return tuple(dict.fromkeys((chosen_kubernetes(), runtime, *network, chosen_helm(), *MODULES)))


KWOK = Module("kwok", ("tool", "./extender", "./post", "./stages", "./watch"), ())
"""kwok, the stages of its nodes and pods, clients and an extender: only for bench/kube_scheduler."""

KARPENTER = Module("karpenter", ("tool",), ())
"""Karpenter with simulated instances; its program is called kwok. Only for scenarios/test_karpenter.py."""

KEDA = Module(
    "keda",
    ("tool",),
    (("github.com/kedacore/keda/v2/version.Version", "github.com/kedacore/keda/v2"),),
)
"""KEDA; its programs are called operator and adapter. Only for engines.py."""

CONTOUR = Module(
    "contour",
    ("tool",),
    (
        (
            "github.com/projectcontour/contour/internal/build.Version",
            "github.com/projectcontour/contour",
        ),
    ),
)
"""Contour, a controller of the Gateway API. Only for engines.py."""

KUEUE = Module(
    "kueue",
    ("tool",),
    (("sigs.k8s.io/kueue/pkg/version.GitVersion", "sigs.k8s.io/kueue"),),
)
"""Kueue's controller. Only for engines.py."""

CRIO = Module(
    "crio",
    ("tool",),
    (),
    cgo_tags="containers_image_openpgp,containers_image_ostree_stub,exclude_graphdriver_btrfs",
)
"""CRI-O without seccomp. Only for virtual_node.py."""

KREW = Module("krew", ("tool",), ())
"""krew, which installs plugins of kubectl. Only for scenarios/test_kubectl_plugins.py."""

REGISTRY = Module("registry", ("fenka.io/e2e/registry",), ())
"""A registry of images and charts. Only for oci_registry.py."""

COLLECTOR = Module("collector", ("fenka.io/e2e/collector",), ())
"""OpenTelemetry's collector. Only for otlp_collector.py."""

DOCKER = (
    Module("docker", ("tool",), (), cgo_tags="exclude_graphdriver_btrfs"),
    Module("docker", ("tool",), (), modfile="compose.mod"),
    Module("docker", ("tool",), (), modfile="runc.mod", cgo_tags=""),
)
"""Docker's engine; its command, and Compose, which is called cmd; runc. Only for docker_machine.py."""


def cache() -> Path:
    """Return the folder that is kept between runs on this machine."""
    default = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fenka-e2e"
    return Path(os.environ.get("FENKA_E2E_CACHE") or default)


def go(*arguments: str, folder: Path = HERE / "cluster") -> str:
    """Return the output of a short go command in a folder with a go.mod."""
    if not shutil.which("go"):
        raise BuildError("`go` is not installed: the cluster is built with Go 1.26 or newer")
    return subprocess.run(
        ["go", *arguments], check=True, capture_output=True, text=True, cwd=folder
    ).stdout.strip()


@contextmanager
def exclusive_lock(lock: Path) -> Iterator[None]:
    """Hold a lock file; wait while another process holds it."""
    lock.parent.mkdir(parents=True, exist_ok=True)
    with lock.open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        yield


def keep_latest(entries: Iterable[Path], keep: int = 3) -> None:
    """Remove all but the entries of the cache that were used last: each change of the sources adds one.

    Checkouts share the cache, so each of them must find its own entry for a while.
    """
    used = sorted(entries, key=lambda path: path.stat().st_mtime)
    for old in used[:-keep]:
        if old.is_dir():
            shutil.rmtree(old)
        else:
            old.unlink()


def missing() -> list[Module]:
    """Return the modules that are not built yet."""
    return [module for module in chosen() if not (module.directory() / COMPLETE).exists()]


@functools.cache
def directories() -> list[Path]:
    """Return the folders of the programs. Raise BuildError if they are not built yet."""
    if missing():
        raise BuildError("the cluster's programs are not built: run `python3 e2e/programs.py`")
    return [module.directory() / "bin" for module in chosen()]


def build(module: Module) -> None:
    """Build one module into the cache unless it is already there."""
    target = module.directory()
    with exclusive_lock(module.lock()):
        if (target / COMPLETE).exists():
            os.utime(target)
            return
        shutil.rmtree(target, ignore_errors=True)
        (target / "bin").mkdir(parents=True)
        for package in module.packages:
            compile_package(module, package, target)
        for name in module.links:
            (target / "bin" / name).symlink_to("kubernetes")
        (target / COMPLETE).touch()
        kind = target.name.rpartition("-")[0]
        keep_latest(path for path in cache().glob(f"{kind}-*") if path.is_dir())


def compile_package(module: Module, package: str, target: Path) -> None:
    """Run go build with its output in a log, which is shown only if the build fails."""
    began = time.monotonic()
    print(f"building {module.name} ({package}) …", flush=True)
    out = target / "bin" / ("kubernetes" if package == "." else "")
    command = ["nice", "go", "build", "-mod=readonly", "-trimpath"]
    command += [f"-modfile={module.modfile}", "-tags", module.cgo_tags or ""]
    command += ["-ldflags", module.linker_flags(), "-o", f"{out}/" if package != "." else str(out)]
    log = target / "build.log"
    with log.open("ab") as output:
        done = subprocess.run(
            [*command, package],
            cwd=module.folder,
            env=os.environ | {"CGO_ENABLED": "0" if module.cgo_tags is None else "1"},
            stdout=output,
            stderr=subprocess.STDOUT,
            check=False,
        )
    if done.returncode:
        tail = "".join(log.read_text(errors="replace").splitlines(keepends=True)[-10:])
        raise BuildError(f"building {module.name} failed; {log} ends with:\n{tail}")
    print(f"built {module.name} ({package}) in {time.monotonic() - began:.0f} s", flush=True)


def main() -> int:
    """Build the missing modules one after another, to limit memory use."""
    try:
        for module in chosen():
            build(module)
    except BuildError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
