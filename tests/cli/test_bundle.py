"""`fenka bundle` packs the files of a release, as far as they are those of the release."""

import hashlib
import io
import json
import re
import shutil
import tarfile
import zipfile
from pathlib import Path

import pytest

from fenka.cli.admin.bundle import KEDA
from tests.cli.command import fenka

REPOSITORY = Path(__file__).parents[2]
VALUES = """
jobset: {image: {repository: registry.k8s.io/jobset/jobset, tag: v0.12.0}}
secondScheduler: {image: "registry.k8s.io/kube-scheduler:v1.37.0"}
"""
CHART = "fenka-0.2.0.tgz"
IMAGE = "fenka-0.2.0-image.tar"
DIGEST = "fenka-0.2.0-image.json"
WHEEL = "fenka-0.2.0-py3-none-manylinux_2_17_x86_64.whl"
CONSTRAINTS = "fenka-0.2.0-constraints.txt"


def write_chart(path: Path, values: str = VALUES) -> None:
    """Write a packaged chart with these values."""
    with tarfile.open(path, "w:gz") as archive:
        entry = tarfile.TarInfo("fenka/values.yaml")
        entry.size = len(values)
        archive.addfile(entry, io.BytesIO(values.encode()))


def write_wheel(path: Path, requires: str = "") -> None:
    """Write a wheel without modules."""
    name, version = path.name.split("-")[:2]
    record = f"{name}-{version}.dist-info"
    tag = path.stem.split("-", 2)[2]
    with zipfile.ZipFile(path, "w") as wheel:
        needs = f"Requires-Dist: {requires}\n" if requires else ""
        wheel.writestr(
            f"{record}/METADATA",
            f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{needs}",
        )
        wheel.writestr(
            f"{record}/WHEEL", f"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: {tag}\n"
        )
        wheel.writestr(f"{record}/RECORD", "")


def write_sums(folder: Path) -> None:
    """Write the checksums of a release."""
    paths = [path for path in sorted(folder.rglob("*")) if path.is_file() and path.suffix]
    lines = [
        f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.relative_to(folder)}\n"
        for path in paths
    ]
    (folder / "SHA256SUMS").write_text("".join(lines))


@pytest.fixture
def release(tmp_path: Path) -> Path:
    """Provide the folder of a small release."""
    folder = tmp_path / "dist"
    folder.mkdir()
    write_chart(folder / CHART)
    write_wheel(folder / WHEEL, "needed>=1")
    (folder / IMAGE).write_bytes(b"image")
    (folder / CONSTRAINTS).write_text("needed==1.5\n")
    (folder / DIGEST).write_text("{}")
    (folder / "fenka-0.2.0.tar.gz").write_bytes(b"sources")
    write_sums(folder)
    return folder


def pack(release: Path, target: Path, *words: str) -> tuple[object, str]:
    """Return the exit code and the error of `fenka bundle pack`."""
    done = fenka("bundle", "pack", str(target), f"--from={release}", *words)
    return done.exit_code, done.stderr


def test_list_names_files_and_references_when_the_release_is_complete(release: Path) -> None:
    """The sdist is not needed, since it requires a compiler."""
    done = fenka("bundle", "list", f"--from={release}", "-o", "json")
    rows = {row["name"]: row["part"] for row in json.loads(done.stdout)}
    assert rows == {
        IMAGE: "image",
        CHART: "chart",
        WHEEL: "wheel",
        CONSTRAINTS: "constraints",
        DIGEST: "digest",
        "registry.k8s.io/jobset/jobset:v0.12.0": "reference",
        "registry.k8s.io/kube-scheduler:v1.37.0": "reference",
        f"ghcr.io/kedacore/keda:{KEDA}": "reference",
        f"ghcr.io/kedacore/keda-metrics-apiserver:{KEDA}": "reference",
        f"ghcr.io/kedacore/keda-admission-webhooks:{KEDA}": "reference",
    }
    assert fenka("bundle", "list", f"--from={release}").stdout.startswith("PART")


def test_bundle_has_verified_files_when_it_is_packed(release: Path, tmp_path: Path) -> None:
    """Its own checksums list everything."""
    target = tmp_path / "bundle"
    assert pack(release, target, "--no-wheels") == (0, "")
    listed = re.findall(r"^(\w{64})  (.+)$", (target / "SHA256SUMS").read_text(), re.MULTILINE)
    assert {name for _, name in listed} == {
        *(IMAGE, CHART, WHEEL, CONSTRAINTS),
        *(DIGEST, "references.txt"),
    }
    for digest, name in listed:
        assert hashlib.sha256((target / name).read_bytes()).hexdigest() == digest
    assert "jobset:v0.12.0\n" in (target / "references.txt").read_text()


@pytest.mark.process
@pytest.mark.skipif(not (shutil.which("pip3") or shutil.which("pip")), reason="needs pip")
def test_locked_wheels_are_in_the_bundle_when_pip_finds_them(
    release: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The newer one is not taken."""
    index = tmp_path / "index"
    index.mkdir()
    for version in ("1.5", "1.6"):
        write_wheel(index / f"needed-{version}-py3-none-any.whl")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(index))
    assert pack(release, tmp_path / "bundle", "--python=3.12") == (0, "")
    names = [path.name for path in (tmp_path / "bundle" / "dependencies").iterdir()]
    assert names == ["needed-1.5-py3-none-any.whl"]

    for path in index.iterdir():
        path.unlink()
    code, error = pack(release, tmp_path / "other")
    assert code == 1
    assert "pip could not download the wheels: " in error
    assert not (tmp_path / "other").exists()


def test_pack_is_refused_when_a_file_is_not_that_of_the_release(
    release: Path, tmp_path: Path
) -> None:
    """A changed file, one that the checksums do not list, and no checksums."""
    target = tmp_path / "bundle"
    (release / IMAGE).write_bytes(b"other")
    code, error = pack(release, target, "--no-wheels")
    assert code == 1
    assert f"{release / IMAGE} is not the file of the release: its checksum differs" in error
    write_sums(release)
    (release / "added.deb").write_bytes(b"")
    assert "added.deb is not the file of the release" in pack(release, target, "--no-wheels")[1]
    (release / "SHA256SUMS").unlink()
    assert "has no SHA256SUMS: take all files" in pack(release, target, "--no-wheels")[1]
    assert not target.exists()


def test_pack_is_refused_when_the_directory_has_files(release: Path, tmp_path: Path) -> None:
    """Nothing of somebody else's is removed."""
    (tmp_path / "mine").write_text("")
    code, error = pack(release, tmp_path, "--no-wheels")
    assert (code, error) == (2, f"fenka: {tmp_path} is not empty: name a new directory\n")
    assert (tmp_path / "mine").exists()


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda folder: (folder / IMAGE).unlink(), "has no file fenka-*-image.tar (the image)"),
        (lambda folder: write_chart(folder / "fenka-0.3.0.tgz"), "has 2 files fenka-[0-9]*.tgz"),
        (lambda folder: write_chart(folder / CHART, "a: b"), "is not fenka's chart: its values"),
        (lambda folder: (folder / CHART).write_bytes(b"x"), "is not fenka's chart: "),
    ],
)
def test_list_names_the_fault_when_the_folder_is_not_a_release(
    release: Path, change: "object", sentence: str
) -> None:
    """One sentence each."""
    assert callable(change)
    change(release)
    done = fenka("bundle", "list", f"--from={release}")
    assert done.exit_code
    assert sentence in done.stderr
    assert done.stderr.count("\n") == 1


def test_keda_has_the_version_of_the_end_to_end_tests() -> None:
    """The bundle names the version that was tried."""
    pinned = (REPOSITORY / "e2e" / "keda" / "go.mod").read_text()
    assert f"github.com/kedacore/keda/v2 v{KEDA} " in pinned.replace("\n", " ")
