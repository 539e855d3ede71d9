"""The builder of Debian packages, without other authors' libraries: `make vm` installs whole packages."""

import io
import lzma
import subprocess
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from deploy.release import deb
from deploy.release.recipe import Release, ReleaseError

ENTRY_POINTS = "[console_scripts]\nfenka = fenka.__main__:main\n"


@pytest.fixture
def release(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Release:
    """A release whose only library is one file."""
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1700000000")
    library = tmp_path / "library"
    (library / "rich").mkdir(parents=True)
    (library / "rich" / "core.cpython-311-x86_64-linux-gnu.so").write_bytes(b"\x7fELF")
    monkeypatch.setattr(deb, "_libraries", lambda *_: library)
    release = Release(tmp_path / "dist", ("x86_64",), work=tmp_path / "work")
    release.into.mkdir()
    page = release.share / "man" / "man1" / "fenka.1"
    page.parent.mkdir(parents=True)
    page.write_text(".TH FENKA 1\n")
    with zipfile.ZipFile(release.wheel("x86_64"), "w") as wheel:
        name = f"fenka-{release.version}.dist-info"
        wheel.writestr(f"{name}/entry_points.txt", ENTRY_POINTS)
        wheel.writestr("fenka/__init__.py", "")
        wheel.writestr(f"{name}/RECORD", "")
    return release


def members(package: Path) -> Iterator[tuple[str, list[tarfile.TarInfo]]]:
    """Yield the files of each archive in a package."""
    content = io.BytesIO(package.read_bytes())
    assert content.read(8) == b"!<arch>\n"
    while header := content.read(60):
        name, size = header[:16].decode().strip(), int(header[48:58])
        archive = content.read(size + size % 2)[:size]
        if name.endswith(".xz"):
            with tarfile.open(fileobj=io.BytesIO(lzma.decompress(archive))) as unpacked:
                yield name, unpacked.getmembers()


def test_package_has_a_virtual_environment_for_each_python(release: Release) -> None:
    """Its modules are in one folder, and all files are root's."""
    archives = dict(members(deb.build_deb(release, release.wheel("x86_64"), "x86_64")))
    files = {member.name: member for member in archives["data.tar.xz"]}
    for python in deb.PYTHONS:
        link = files[f"./usr/lib/fenka/lib/python{python}/site-packages"]
        assert link.linkname == "../../site-packages"
    assert files["./usr/lib/fenka/bin/python3"].linkname == "/usr/bin/python3"
    assert files["./usr/bin/fenka"].mode == 0o755
    assert files["./usr/share/man/man1/fenka.1.gz"].mode == 0o644
    assert {(file.uid, file.gid, file.uname) for file in files.values()} == {(0, 0, "root")}
    assert {file.mtime for file in files.values()} == {1700000000}
    assert not any(name.endswith("RECORD") for name in files)
    library = "./usr/lib/fenka/site-packages/rich/core.cpython-311-x86_64-linux-gnu.so"
    assert files[library].mode == 0o644
    scripts = {member.name: member.mode for member in archives["control.tar.xz"]}
    assert scripts["./postinst"] == scripts["./prerm"] == scripts["./postrm"] == 0o755


def test_package_has_the_same_bytes_when_it_is_built_twice(release: Release) -> None:
    """So everyone can check that it is made from these sources."""
    first = deb.build_deb(release, release.wheel("x86_64"), "x86_64").read_bytes()
    assert deb.build_deb(release, release.wheel("x86_64"), "x86_64").read_bytes() == first


@pytest.mark.parametrize(
    ("python", "debian"),
    [("0.2.0", "0.2.0"), ("0.2.0rc1", "0.2.0~rc1"), ("1.0.0.dev3", "1.0.0~dev3")],
)
def test_version_of_a_pre_release_is_below_that_of_the_release(python: str, debian: str) -> None:
    """A tilde is below the end of the version, for dpkg."""
    assert deb.debian_version(python) == debian


def test_wheels_of_two_pythons_must_agree(tmp_path: Path) -> None:
    """What only describes the build may differ."""
    merged = tmp_path / "merged"
    for python, content in (("3.11", "a"), ("3.12", "b")):
        for name in ("numpy/core.py", "numpy/__config__.py", "numpy/tests/test_core.py"):
            path = tmp_path / python / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(content)
    deb._merge(tmp_path / "3.11", merged)
    with pytest.raises(ReleaseError, match=r"numpy/core\.py is not the same .* Python 3\.12"):
        deb._merge(tmp_path / "3.12", merged)
    files = sorted(str(path.relative_to(merged)) for path in merged.rglob("*.py"))
    assert files == ["numpy/__config__.py", "numpy/core.py"]


@pytest.mark.parametrize("script", deb.SCRIPTS)
def test_scripts_are_valid(script: str) -> None:
    """The shell reads them."""
    subprocess.run(["sh", "-n", deb.SOURCES / script], check=True)
