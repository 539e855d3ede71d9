"""fenka's image: a minimal Debian with Python, the locked dependencies and the wheel, for each processor.

It has no shell, no package manager and no program that runs as another user. It is built without a container
engine, root or a registry. Three layers, of which a new release usually changes the last one only: Debian,
dependencies, fenka.
"""

import configparser
import fcntl
import hashlib
import json
import platform
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Final

from deploy.release.debian import Archive, Package, unpack
from deploy.release.layout import Blob, make_layer, pack_layout, write_image, write_index
from deploy.release.recipe import PROCESSORS, Release, ReleaseError

PACKAGES: Final = (
    "base-files",
    "ca-certificates",
    "libc-bin",
    "libpython3-stdlib",
    "libstdc++6",
    "netbase",
    "python3-minimal",
    "tzdata",
)
WITHOUT: Final = frozenset(
    {
        "debconf",
        "dpkg",
        "libacl1",
        "libmd0",
        "libpcre2-8-0",
        "libselinux1",
        "mawk",
        "openssl",
        "openssl-provider-legacy",
        "readline-common",
        "tar",
    }
)
"""Dependencies of scripts that install packages."""
RECIPES: Final = ("debian", "image", "layout")
"""The modules of this package on which layers depend."""
UNNEEDED: Final = (
    "etc/cron*",
    "etc/ld.so.conf.d",
    "usr/lib/*/gconv",
    "usr/lib/python3*/idlelib",
    "usr/lib/python3*/pydoc_data",
    "usr/share/bash-completion",
    "usr/share/bug",
    "usr/share/common-licenses/GFDL*",
    "usr/share/debconf",
    "usr/share/doc/*/[!c]*",
    "usr/share/doc/*/changelog*",
    "usr/share/gcc",
    "usr/share/info",
    "usr/share/lintian",
    "usr/share/man",
    "usr/share/perl5",
    "usr/share/pixmaps",
    "usr/share/polkit-1",
    "usr/sbin/update-*",
    "var/cache",
    "var/lib/dpkg/info",
)
EXTRAS: Final = ("cluster", "autoscaler", "alibaba", "aws", "serve", "traces")
GLIBC: Final = "manylinux_2_40"
"""Wheels may need this version of glibc, which Debian's package in the image has."""
USER: Final = 65532
"""Not root: the scheduler needs no rights, and the node program's manifest requests its own."""
HOME: Final = Path("opt", "fenka")
FILES: Final = {
    "etc/passwd": f"root:x:0:0:root:/root:/sbin/nologin\nfenka:x:{USER}:{USER}:fenka:/tmp:/sbin/nologin\n",
    "etc/group": f"root:x:0:\nfenka:x:{USER}:\n",
    "etc/nsswitch.conf": "passwd: files\ngroup: files\nhosts: files dns\nservices: files\nprotocols: files\n",
}
ENVIRONMENT: Final = (
    f"PATH=/{HOME}/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    "PYTHONUNBUFFERED=1",
    "PYTHONDONTWRITEBYTECODE=1",
)
SCRIPT: Final = """\
#!/{home}/bin/python
import sys
from {module} import {function}
sys.exit({function}())
"""
MODES: Final = {"tmp": 0o1777, "var/tmp": 0o1777, "root": 0o700}


@dataclass(frozen=True)
class Base:
    """Debian with Python, unpacked.

    Attributes:
        root: the folder.
        packages: its packages.
    """

    root: Path
    packages: Sequence[Package]

    @property
    def python(self) -> str:
        """Return the version of Python: its first two numbers."""
        (library,) = self.root.glob("usr/lib/python3.*")
        return library.name.removeprefix("python")


@dataclass(frozen=True)
class Builder:
    """Builds the layers of images, each once.

    Attributes:
        release: runs programs, and knows the wheels.
        folder: for the layers and what they are made of.
        latest: Whether Debian's latest packages are fetched even if an earlier run has fetched some.
    """

    release: Release
    folder: Path
    latest: bool = True
    _bases: dict[str, Base] = field(default_factory=dict)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the folder's lock; wait while another build uses the folder."""
        self.folder.mkdir(parents=True, exist_ok=True)
        with (self.folder / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def base(self, processor: str) -> Base:
        """Return Debian with Python for a processor, by Linux' name of it. Raises ReleaseError."""
        if processor not in self._bases:
            self._bases[processor] = self._make_base(processor)
        return self._bases[processor]

    def _make_base(self, processor: str) -> Base:
        architecture = PROCESSORS[processor]
        archive = Archive(self.release, architecture, self.folder / "apt" / architecture)
        packages = archive.fetch(PACKAGES, WITHOUT, self.latest)
        root = self.folder / "debian" / f"{architecture}-{_hash(__file__, packages)}"
        if not root.exists():
            partial = root.with_suffix(".partial")
            shutil.rmtree(partial, ignore_errors=True)
            unpack(self.release, packages, partial)
            _finish(partial)
            partial.rename(root)
        return Base(root, packages)

    def compile(self, tree: Path, at: Path) -> None:
        """Write the bytecode of a folder's modules. Raises ReleaseError.

        The image's own version of Python must do it. Bytecode is the same for all processors, so the
        program for this machine's processor compiles for the others, too.

        Args:
            tree: the folder.
            at: its path in the image.
        """
        base = self.base(_own_processor())
        libraries = next(base.root.glob("usr/lib/*-linux-gnu"))
        linker = next(base.root.glob("usr/lib*/ld-linux-*.so.*"), None) or next(
            libraries.glob("ld-linux-*.so.*")
        )
        python = base.root / "usr" / "bin" / f"python{base.python}"
        compileall = ("-m", "compileall", "-q", "-j1", "--invalidation-mode=unchecked-hash")
        self.release.run(
            *(linker, "--library-path", libraries, python, "-SsB", *compileall),
            *("-s", tree, "-p", f"/{at}", tree),
            environment={"PYTHONHOME": str(base.root / "usr"), "PYTHONHASHSEED": "0"},
        )

    def layer(self, name: str, key: str, make: Callable[[Path], None]) -> Blob:
        """Return a layer, which `make` fills a folder for unless there is one of this key."""
        blobs = self.folder / "layers"
        record = blobs / f"{name}-{key}.json"
        if record.exists():
            known = json.loads(record.read_text())
            return Blob(blobs / known["file"], known["media_type"], known["diff_id"])
        tree = self.folder / f"{name}.tree"
        shutil.rmtree(tree, ignore_errors=True)
        tree.mkdir(parents=True)
        make(tree)
        blob = make_layer(tree, blobs, MODES)
        shutil.rmtree(tree)
        record.write_text(json.dumps({**asdict(blob), "file": blob.file.name}))
        return blob

    def layers(self, processor: str, wheel: Path) -> list[Blob]:
        """Return the layers of a processor's image, the lowest first. Raises ReleaseError."""
        base = self.base(processor)
        architecture = PROCESSORS[processor]
        site = HOME / "lib" / f"python{base.python}" / "site-packages"
        locked = self.release.uv(
            *("export", "--quiet", "--frozen", "--no-header", "--no-emit-project"),
            *("--no-default-groups", *(f"--extra={extra}" for extra in EXTRAS)),
        ).decode()

        def debian(tree: Path) -> None:
            shutil.copytree(base.root, tree, symlinks=True, dirs_exist_ok=True)
            standard = Path("usr", "lib", f"python{base.python}")
            self.compile(tree / standard, standard)

        def dependencies(tree: Path) -> None:
            requirements = self.folder / "requirements.txt"
            requirements.write_text(locked)
            self._install(processor, base, tree / site, "--require-hashes", "-r", requirements)
            shutil.rmtree(tree / site / "bin", ignore_errors=True)
            self.compile(tree / site, site)
            _write_environment(tree / HOME, base.python)

        def program(tree: Path) -> None:
            self._install(processor, base, tree / site, wheel)
            for folder in ("bin", "etc", "share"):
                shutil.rmtree(tree / site / folder, ignore_errors=True)
            self.compile(tree / site, site)
            _write_scripts(tree, site)

        here = _hash(__file__, base.packages)
        return [
            self.layer(f"debian-{architecture}", here, debian),
            self.layer(f"dependencies-{architecture}", _hash(here, locked), dependencies),
            self.layer(f"fenka-{architecture}", _hash(here, wheel.read_bytes()), program),
        ]

    def _install(self, processor: str, base: Base, site: Path, *what: str | Path) -> None:
        """Install packages for a processor into a folder. Raises ReleaseError if one is for another one."""
        self.release.uv(
            *("pip", "install", "--quiet", "--no-deps", "--link-mode=copy", "--target", site),
            *(f"--python-version={base.python}", f"--python-platform={processor}-{GLIBC}", *what),
        )
        (site / ".lock").unlink(missing_ok=True)
        for record in site.glob("*.dist-info"):
            # They name this machine's paths and times.
            for name in ("direct_url.json", "uv_cache.json", "RECORD"):
                (record / name).unlink(missing_ok=True)
        for library in sorted(site.rglob("*.so*")):
            header = library.read_bytes()[:20]
            if header[:4] == b"\x7fELF" and _MACHINES.get(header[18]) != processor:
                raise ReleaseError(f"{library.relative_to(site)} is not for {processor}")


_MACHINES: Final = {62: "x86_64", 183: "aarch64"}
"""Values of ELF's e_machine."""


def _own_processor() -> str:
    """Return the processor of this machine. Raises ReleaseError if no image can be built on it."""
    if platform.system() != "Linux" or platform.machine() not in PROCESSORS:
        raise ReleaseError(
            f"images are built on Linux on {' or '.join(PROCESSORS)}, not on "
            f"{platform.system()} on {platform.machine()}"
        )
    return platform.machine()


def _hash(*parts: object) -> str:
    """Return a short hash of what a layer is made of. A path of a module stands for its content."""
    digest = hashlib.sha256()
    for part in parts:
        content: object = part
        if part == __file__:
            modules = sorted(Path(__file__).parent.glob("*.py"))
            content = [path.read_text() for path in modules if path.stem in RECIPES]
        elif isinstance(part, Sequence) and part and isinstance(part[0], Package):
            content = [package.file.name for package in part]
        digest.update(content if isinstance(content, bytes) else repr(content).encode())
        digest.update(b"\0")
    return digest.hexdigest()[:16]


def _finish(root: Path) -> None:
    """Remove what the image does not need, and write what the packages' scripts would have written."""
    authorities = sorted((root / "usr/share/ca-certificates").rglob("*.crt"))
    bundle = root / "etc/ssl/certs/ca-certificates.crt"
    bundle.parent.mkdir(parents=True, exist_ok=True)
    bundle.write_text("".join(path.read_text() for path in authorities))
    shutil.rmtree(root / "usr/share/ca-certificates")
    for pattern in UNNEEDED:
        for path in sorted(root.glob(pattern)):
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                # A folder may be reached by a link as well, and its files are gone then.
                path.unlink(missing_ok=True)
    ssl = root / "usr" / "lib" / "ssl"
    ssl.mkdir(exist_ok=True)
    (ssl / "certs").symlink_to("/etc/ssl/certs")
    (ssl / "cert.pem").symlink_to("/etc/ssl/certs/ca-certificates.crt")
    for name, text in FILES.items():
        (root / name).write_text(text)


def _write_environment(home: Path, python: str) -> None:
    """Make a folder a virtual environment."""
    (home / "pyvenv.cfg").write_text(
        f"home = /usr/bin\ninclude-system-site-packages = false\nversion = {python}\n"
    )
    programs = home / "bin"
    programs.mkdir()
    (programs / "python").symlink_to(f"/usr/bin/python{python}")
    (programs / "python3").symlink_to("python")


def _write_scripts(tree: Path, site: Path) -> None:
    """Write the commands of fenka's wheel."""
    (record,) = (tree / site).glob("fenka-*.dist-info/entry_points.txt")
    points = configparser.ConfigParser(delimiters=("=",))
    points.read_string(record.read_text())
    programs = tree / HOME / "bin"
    programs.mkdir(parents=True)
    for name, target in points["console_scripts"].items():
        module, _, function = target.partition(":")
        script = programs / name
        script.write_text(SCRIPT.format(home=HOME, module=module, function=function))
        script.chmod(0o755)


def build_archive(
    builder: Builder, wheels: Mapping[str, Path], names: Mapping[str, str], target: Path
) -> Blob:
    """Write an OCI image layout, as an archive, and return its index. Raises ReleaseError.

    Args:
        builder: builds the layers.
        wheels: fenka's, by processor.
        names: annotations that tell programs how to call the image.
        target: the archive.
    """
    release = builder.release
    about = {
        "org.opencontainers.image.title": "fenka",
        "org.opencontainers.image.description": "GPU sharing for people who have fewer GPUs than programs",
        "org.opencontainers.image.licenses": "Apache-2.0",
        "org.opencontainers.image.version": release.version,
    }
    settings = {
        "User": f"{USER}:{USER}",
        "Env": list(ENVIRONMENT),
        "Entrypoint": ["fenka"],
        "WorkingDir": "/",
        "Labels": about,
    }
    with builder.locked(), tempfile.TemporaryDirectory(dir=builder.folder) as layout:
        blobs = Path(layout, "blobs", "sha256")
        blobs.mkdir(parents=True)
        images = []
        for processor, wheel in wheels.items():
            machine = {"architecture": PROCESSORS[processor], "os": "linux"}
            machine |= {"variant": "v8"} if processor == "aarch64" else {}
            layers = builder.layers(processor, wheel)
            images.append((machine, write_image(blobs, machine, layers, {"config": settings})))
        index = write_index(blobs, images, about)
        pack_layout(Path(layout), index, names, target)
    return replace(index, file=Path(index.file.name))


def image_path(release: Release) -> Path:
    """Return the path of the image's archive."""
    return release.into / f"fenka-{release.version}-image.tar"


def build_image(release: Release) -> list[Path]:
    """Build the image of all processors, and lists of its Debian packages and of the locked wheels.

    Raises ReleaseError.
    """
    builder = Builder(release, release.work / "image")
    wheels = {processor: release.wheel(processor) for processor in release.processors}
    if missing := [str(wheel) for wheel in wheels.values() if not wheel.exists()]:
        raise ReleaseError(f"no {', '.join(missing)}: run the step `wheels` first")
    target = image_path(release)
    names = {
        "org.opencontainers.image.ref.name": release.version,
        # By this name the chart's default values find it after `ctr images import`.
        "io.containerd.image.name": f"docker.io/library/fenka:{release.version}",
    }
    index = build_archive(builder, wheels, names, target)
    packages = {
        PROCESSORS[processor]: {
            package.name: package.version for package in builder.base(processor).packages
        }
        for processor in release.processors
    }
    # Wheels for machines without the Internet are chosen by it, and pip rejects hashes there.
    constraints = release.into / f"fenka-{release.version}-constraints.txt"
    exported = ("export", "--quiet", "--frozen", "--no-header", "--no-emit-project", "--no-hashes")
    constraints.write_bytes(
        release.uv(*exported, "--all-extras", "--no-default-groups", "--no-annotate")
    )
    listed = target.with_suffix(".json")
    document = {"digest": index.digest, "packages": packages}
    listed.write_text(json.dumps(document, indent=2) + "\n")
    return [target, listed, constraints]
