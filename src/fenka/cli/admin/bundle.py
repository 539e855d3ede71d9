"""`fenka bundle`: lists and packs what an installation without the Internet needs, from a release's files."""

import hashlib
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, Final

import typer
import yaml

from fenka.cli import tables
from fenka.cli.common_options import OutputOption, group, register
from fenka.cli.error_report import UserError
from fenka.core.errors import INVALID_INPUT

app = group("Pack what an installation without the Internet needs.")

SUMS: Final = "SHA256SUMS"
REFERENCES: Final = "references.txt"
DEPENDENCIES: Final = "dependencies"
NEEDED: Final = ("image", "chart")
PARTS: Final = {
    "image": ("fenka-*-image.tar", "image of fenka's pods, for all processors"),
    "chart": ("fenka-[0-9]*.tgz", "Helm chart, with JobSet's"),
    "wheel": ("fenka-*.whl", "fenka's commands"),
    "constraints": ("fenka-*-constraints.txt", "versions of the wheels that fenka's need"),
    "package": ("*.deb", "Debian packages for workstations"),
    "digest": ("fenka-*-image.json", "digest of the image, and its Debian packages"),
    "plugin": ("kubectl-fenka-*.tar.gz", "plugin of kubectl, with all that it needs"),
    "contents": ("*.cdx.json", "bill of materials"),
}
"""Parts of a release: the names of their files, and their purpose."""
CLUSTERS_SCHEDULER: Final = "registry.k8s.io/kube-scheduler:v<the cluster's version>"
KEDA: Final = "2.21.0"
"""The version on which the end-to-end tests run."""
KEDA_IMAGES: Final = ("keda", "keda-metrics-apiserver", "keda-admission-webhooks")
GLIBC_MINORS: Final = range(28, 16, -1)
"""Wheels may need glibc 2.17 to 2.28, so that they can be installed on Debian 10 and Red Hat 8 too."""

FromOption = Annotated[
    Path, typer.Option("--from", metavar="DIRECTORY", help="the files of a release")
]


@dataclass(frozen=True, slots=True)
class Artifact:
    """A row of the list.

    Attributes:
        part: A key of PARTS, or `reference` for an image that is not packed.
        name: The path below the release's folder, or the image's name.
        purpose: The use of it, for people.
        mib: Size in MiB; None for a reference.
    """

    part: str
    name: str
    purpose: str
    mib: float | None = None


def list_artifacts(release: FromOption = Path(), output: OutputOption = "table") -> None:
    """Print the artifacts of a release, and the images of others that parts of it need."""
    artifacts = [*_files(release), *_references(release)]
    if tables.print_data([asdict(artifact) for artifact in artifacts], output):
        return
    lines = [["PART", "NAME", "MIB", "PURPOSE"]]
    for artifact in artifacts:
        size = "-" if artifact.mib is None else f"{artifact.mib:.1f}"
        lines.append([artifact.part, artifact.name, size, artifact.purpose])
    tables.print_lines(tables.align(lines))


def pack(
    directory: Annotated[Path, typer.Argument(help="a new directory")],
    release: FromOption = Path(),
    wheels: Annotated[
        bool, typer.Option(help="download the wheels that fenka's wheel needs (by pip)")
    ] = True,
    extra: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="with what this extra of fenka needs")
    ] = None,
    version: Annotated[
        str,
        typer.Option(
            "--python", metavar="VERSION", help="Python of the machines that install the wheels"
        ),
    ] = f"{sys.version_info.major}.{sys.version_info.minor}",
    machine: Annotated[
        str, typer.Option(metavar="PROCESSOR", help="their processor: x86_64 or aarch64")
    ] = "x86_64",
) -> None:
    """Copy a release's files, verified, and the wheels that fenka needs, to a new directory."""
    files = list(_files(release))
    references = list(_references(release))
    _verify(release, files)
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise UserError(f"{directory} is not empty: name a new directory", INVALID_INPUT)
    # An interrupted run must not leave what looks like a bundle.
    partial = directory.with_name(f"{directory.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    for artifact in files:
        target = partial / artifact.name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(release / artifact.name, target)
    if wheels:
        _download(partial, files, extra or (), version, machine)
    (partial / REFERENCES).write_text("".join(f"{image.name}\n" for image in references))
    content = sorted(path for path in partial.rglob("*") if path.is_file())
    lines = [f"{_sha256(path)}  {path.relative_to(partial)}\n" for path in content]
    (partial / SUMS).write_text("".join(lines))
    if directory.exists():
        directory.rmdir()
    partial.rename(directory)
    size = sum(path.stat().st_size for path in directory.rglob("*")) / 2**20
    print(f"packed {len(content)} files of {size:.0f} MiB into {directory}")
    if references:
        print(f"copy the images that you use of {directory / REFERENCES}, for example by skopeo")


register(app, list_artifacts, "List what an installation needs.", name="list")
register(app, pack, "Pack a release's files and the wheels that it needs.")


def _files(release: Path) -> Iterator[Artifact]:
    """Yield the files of a release. Raises UserError if one is missing that each cluster needs."""
    for part, (pattern, purpose) in PARTS.items():
        paths = sorted(release.glob(pattern))
        if part in NEEDED and len(paths) != 1:
            found = "no file" if not paths else f"{len(paths)} files"
            raise UserError(
                f"{release} has {found} {pattern} (the {part}): name the folder of one release by --from",
                INVALID_INPUT,
            )
        for path in paths:
            size = path.stat().st_size / 2**20
            yield Artifact(part, str(path.relative_to(release)), purpose, size)


def _references(release: Path) -> Iterator[Artifact]:
    """Yield the images of others that the chart of a release can use. Raises UserError."""
    (chart,) = release.glob(PARTS["chart"][0])
    values = _values(chart)
    try:
        jobset = values["jobset"]["image"]
        yield Artifact(
            "reference", f"{jobset['repository']}:{jobset['tag']}", "with jobset.enabled"
        )
        scheduler = values["secondScheduler"]["image"] or CLUSTERS_SCHEDULER
        yield Artifact("reference", scheduler, "with secondScheduler.enabled")
    except (KeyError, TypeError):
        raise UserError(f"{chart} is not fenka's chart: its values name no images") from None
    for name in KEDA_IMAGES:
        yield Artifact(
            "reference", f"ghcr.io/kedacore/{name}:{KEDA}", "with services that KEDA scales"
        )


def _values(chart: Path) -> Mapping[str, Any]:
    """Return the values of a packaged chart. Raises UserError."""
    try:
        with tarfile.open(chart) as archive:
            member = archive.extractfile("fenka/values.yaml")
            values = yaml.safe_load(member.read()) if member else None
    except (KeyError, tarfile.TarError, yaml.YAMLError) as error:
        raise UserError(f"{chart} is not fenka's chart: {error}") from None
    return values if isinstance(values, dict) else {}


def _verify(release: Path, files: Sequence[Artifact]) -> None:
    """Compare files with the release's checksums. Raises UserError if one differs or is not listed."""
    sums = release / SUMS
    if not sums.exists():
        raise UserError(f"{release} has no {SUMS}: take all files of the release", INVALID_INPUT)
    known = {
        name.strip(): digest
        for digest, _, name in (line.partition(" ") for line in sums.read_text().splitlines())
    }
    for artifact in files:
        if known.get(artifact.name) != _sha256(release / artifact.name):
            raise UserError(
                f"{release / artifact.name} is not the file of the release: its checksum differs from "
                f"{SUMS}. Download it again"
            )


def _sha256(path: Path) -> str:
    with path.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()


def _download(
    bundle: Path, files: Sequence[Artifact], extras: Sequence[str], version: str, machine: str
) -> None:
    """Download the wheels that fenka's needs, for other machines than this one. Raises UserError."""
    wheels = [Path(artifact.name) for artifact in files if artifact.part == "wheel"]
    wheel = next((path for path in wheels if path.stem.endswith(f"_{machine}")), None)
    constraints = next(bundle.glob(PARTS["constraints"][0]), None)
    if wheel is None or constraints is None:
        missing = f"wheel for {machine}" if wheel is None else "file of constraints"
        raise UserError(f"the release has no {missing}: pack without wheels by --no-wheels")
    # An environment of pipx or uv has no pip of its own; another one's chooses the same wheels.
    installed = shutil.which("pip3") or shutil.which("pip")
    pip = [sys.executable, "-Pm", "pip"] if find_spec("pip") else [installed] if installed else None
    if pip is None:
        raise UserError(
            "pip is not installed here, which downloads wheels: install it, or pack without them by "
            "--no-wheels"
        )
    bundle = bundle.absolute()
    named = f"{bundle / wheel}[{','.join(extras)}]" if extras else str(bundle / wheel)
    command = [*pip, "download", "--quiet", "--only-binary=:all:"]
    command += [f"--dest={bundle / DEPENDENCIES}", f"--constraint={constraints.absolute()}"]
    platforms = [f"manylinux_2_{minor}" for minor in GLIBC_MINORS] + ["manylinux2014"]
    command += [f"--platform={platform}_{machine}" for platform in platforms]
    command += [f"--python-version={version}", named]
    done = subprocess.run(command, cwd="/", capture_output=True, text=True, check=False)
    if done.returncode:
        reason = (done.stderr.strip() or done.stdout.strip()).splitlines()[-1]
        raise UserError(f"pip could not download the wheels: {reason}")
    # pip copies the wheel that was named, too.
    (bundle / DEPENDENCIES / wheel.name).unlink(missing_ok=True)
