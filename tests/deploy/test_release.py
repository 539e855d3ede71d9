"""Test the small parts of a release: its version, pages, plugins and lists."""

import json
import os
import shutil
import subprocess
import sys
import tarfile
import tomllib
from functools import cache
from pathlib import Path

import pytest
import yaml

import fenka
from deploy.release import krew, manifest, version, wheels
from deploy.release.__main__ import STEPS, main
from deploy.release.archive import files_below, write_archive
from deploy.release.man_pages import man_pages
from deploy.release.recipe import ROOT, Release, ReleaseError
from fenka.cli.command_tree import CommandHelp, command_tree
from fenka.cli.completion_scripts import completions
from fenka.cli.main import ADMIN_ROWS, USERS_ROWS

EPOCH = 1_700_000_000

tree = cache(command_tree)


@pytest.fixture
def release(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Release:
    """Provide an empty release."""
    monkeypatch.setenv("SOURCE_DATE_EPOCH", str(EPOCH))
    made = Release(tmp_path / "dist", ("x86_64",), tmp_path / "work")
    made.into.mkdir()
    made.work.mkdir()
    return made


def test_version_is_the_same_everywhere() -> None:
    """The chart, and names of images and files in the documentation, repeat the package's version."""
    assert version.current_version(ROOT) == fenka.__version__
    assert {found for _, found in version.repetitions(ROOT)} == {fenka.__version__}
    headings = [
        line for line in (ROOT / "CHANGELOG.md").read_text().splitlines() if line[:3] == "## "
    ]
    assert headings[0].startswith(f"## {fenka.__version__}")


def test_next_version_is_written_into_each_place(tmp_path: Path) -> None:
    """Other numbers stay."""
    for name in ("src/fenka/__init__.py", "deploy/chart/Chart.yaml"):
        (tmp_path / name).parent.mkdir(parents=True)
        shutil.copy(ROOT / name, tmp_path / name)
    (tmp_path / "docs").mkdir()
    page = tmp_path / "docs" / "page.md"
    page.write_text(
        "fenka:0.2.0, fenka_0.2.0_amd64.deb, fenka-0.2.0.tar.gz, helm 3.18.0, T4 0.2.0\n"
    )
    version.write_version(tmp_path, "10.3.1")
    assert {found for _, found in version.repetitions(tmp_path)} == {"10.3.1"}
    assert page.read_text() == (
        "fenka:10.3.1, fenka_10.3.1_amd64.deb, fenka-10.3.1.tar.gz, helm 3.18.0, T4 0.2.0\n"
    )
    assert version.current_version(tmp_path) == "10.3.1"
    chart = yaml.safe_load((tmp_path / "deploy/chart/Chart.yaml").read_text())
    assert (chart["version"], chart["appVersion"]) == ("10.3.1", "10.3.1")
    with pytest.raises(ValueError, match=r"1\.2 is no version"):
        version.write_version(tmp_path, "1.2")


def test_unknown_step_is_refused_with_the_names_of_all(capsys: pytest.CaptureFixture[str]) -> None:
    """A misspelt step must not make half a release."""
    with pytest.raises(SystemExit) as ended:
        main(["wheel"])
    assert ended.value.code == 2
    assert "no step is called wheel" in capsys.readouterr().err


def test_failed_step_ends_the_release_with_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Later steps would publish what is there."""

    def broken(_: Release) -> list[Path]:
        raise ReleaseError("`uv` is not installed")

    monkeypatch.setitem(STEPS, "wheels", broken)
    assert main(["wheels", "sums", "--into", str(tmp_path)]) == 1
    assert capsys.readouterr().err == "wheels: `uv` is not installed\n"
    assert list(tmp_path.iterdir()) == []


def test_tree_has_all_commands_with_their_options() -> None:
    """The programs of operators are below `admin`."""
    words = {command.words for command in tree().walk()}
    assert {("fenka", row.name) for row in USERS_ROWS} <= words
    assert {("fenka", "admin", row.name) for row in ADMIN_ROWS} <= words
    assert ("fenka", "submit", "mpijob") in words
    bare = [command.words for command in tree().walk() if not command.options]
    assert bare == []


def test_every_command_has_a_man_page_without_warnings(tmp_path: Path) -> None:
    """Groff reports unknown requests, wrong escapes and missing glyphs."""
    pages = man_pages(tree(), "1.2.3", EPOCH)
    expected = {f"fenka-{row.name}.1" for row in USERS_ROWS}
    expected |= {f"fenka-admin-{row.name}.1" for row in ADMIN_ROWS}
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    expected |= {f"{command}.1" for command in scripts}
    assert set(pages) == expected
    assert pages["kubectl-fenka.1"] == ".so man1/fenka.1\n"
    assert '.TH FENKA-RUN 1 2023-11-14 "fenka 1.2.3"' in pages["fenka-run.1"]
    if not shutil.which("groff"):
        pytest.skip("groff is not installed")
    (tmp_path / "man1").mkdir()
    for name, text in pages.items():
        (tmp_path / "man1" / name).write_text(text)
    command = ["groff", "-man", "-Tutf8", "-ww", "-z", *(f"man1/{name}" for name in pages)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_man_page_shows_hyphens_quotes_and_dots_as_they_are(tmp_path: Path) -> None:
    """Copied options must work, and a line that begins with a dot is text."""
    command = CommandHelp(("fenka", "x-y"), ".dot 'quote' \\back", (("NAME", "'first"),))
    text = man_pages(CommandHelp(("fenka",), "All.", (), (), (command,)), "1.0.0", 0)["fenka-x-y.1"]
    (tmp_path / "page.1").write_text(text)
    if not shutil.which("groff"):
        pytest.skip("groff is not installed")
    printed = subprocess.run(
        ["groff", "-man", "-Tascii", "-P-cbou", str(tmp_path / "page.1")],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert ".dot 'quote' \\back" in printed
    assert "'first" in printed
    assert "fenka x-y" in printed


BASH = """
source "$1"
shift
COMP_WORDS=(fenka "$@")
COMP_CWORD=$#
_fenka
printf '%s\\n' "${COMPREPLY[@]}"
"""

ZSH = """
source() { :; }
_files() { print -r -- @file }
_message() { print -r -- @word }
compadd() { shift; print -rl -- $@ }
_describe() { print -rl -- ${(P)2%%:*} }
compdef() { :; }
script=$1
shift
. $script
words=(fenka "$@")
CURRENT=$#words
_fenka
"""

FISH = """
source $argv[1]
complete -C (string join -- ' ' fenka $argv[2..]) | string replace -r '\\t.*' ''
"""


@pytest.mark.parametrize(
    ("words", "expected", "others"),
    [
        (("submit", ""), {"mpijob", "tfjob", "pytorchjob"}, {"run"}),
        (("run", "--gpu-core-mode", ""), {"hard", "soft", "weight"}, {"--gpu-mem"}),
        (("log", "--fo"), {"--follow"}, {"run"}),
        (("daemon", "--sim"), {"--simulate"}, {"run"}),
        (("admin", "mig", ""), {"plan", "apply"}, {"daemon"}),
        (("",), {"run", "admin", "demo"}, {"mpijob", "daemon"}),
    ],
)
@pytest.mark.parametrize(("shell", "program"), [("bash", BASH), ("zsh", ZSH), ("fish", FISH)])
def test_shell_completes_commands_options_and_values(
    tmp_path: Path,
    shell: str,
    program: str,
    words: tuple[str, ...],
    expected: set[str],
    others: set[str],
) -> None:
    """Aliases and operators' words lead to the same command."""
    if not shutil.which(shell):
        pytest.skip(f"{shell} is not installed")
    (text,) = (text for name, text in completions(tree()).items() if name.startswith(shell))
    script = tmp_path / "script"
    script.write_text(text)
    # fish and bash have $0 after -c; zsh too.
    end = [str(script), *words] if shell == "fish" else [shell, str(script), *words]
    done = subprocess.run(
        [shell, *(["--no-config"] if shell == "fish" else []), "-c", program, *end],
        env={**os.environ, "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stderr == ""
    found = set(done.stdout.split())
    assert expected <= found
    assert not others & found


def test_archive_has_the_same_bytes_whatever_the_files_times_and_owners(tmp_path: Path) -> None:
    """Also the order of the names is fixed."""
    archives = []
    for number, order in enumerate((("a", "b"), ("b", "a"))):
        folder = tmp_path / str(number)
        folder.mkdir()
        for name in order:
            (folder / name).write_text(name)
            os.utime(folder / name, (number, number))
        (folder / "a").chmod(0o700 if number else 0o755)
        archives.append(tmp_path / f"{number}.tar.gz")
        write_archive(archives[-1], files_below(folder, "x/"), EPOCH)
    assert archives[0].read_bytes() == archives[1].read_bytes()
    with tarfile.open(archives[0]) as archive:
        members = [(member.name, member.mode, member.mtime, member.uid) for member in archive]
    assert members == [("x/a", 0o755, EPOCH, 0), ("x/b", 0o644, EPOCH, 0)]


def test_plugins_manifests_name_an_archive_for_each_platform(
    release: Release, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Krew refuses manifests with unknown fields, wrong digests or versions without v."""

    def filled(_: Release, folder: Path, platform: str, __: tuple[str, ...]) -> None:
        (folder / "kubectl-fenka").write_text(platform)

    monkeypatch.setattr(krew, "fill_plugin", filled)
    monkeypatch.setenv("FENKA_RELEASE_URL", "https://example.org/down/")
    paths = krew.build_plugins(release)
    names = {path.name for path in paths}
    assert {"fenka.yaml", "inspect-gpushare.yaml"} < names
    for name in ("fenka", "inspect-gpushare"):
        document = yaml.safe_load((release.into / f"{name}.yaml").read_text())
        assert document["apiVersion"] == "krew.googlecontainertools.github.com/v1alpha2"
        assert document["metadata"] == {"name": name}
        spec = document["spec"]
        assert spec["version"] == f"v{fenka.__version__}"
        assert len(spec["shortDescription"]) <= 50
        selected = []
        for platform in spec["platforms"]:
            assert set(platform) == {"selector", "uri", "sha256", "bin"}
            assert platform["bin"] == f"kubectl-{name}"
            archive = platform["uri"].removeprefix(
                f"https://example.org/down/v{fenka.__version__}/"
            )
            assert platform["sha256"] == manifest.sha256(release.into / archive)
            selected.append(tuple(platform["selector"]["matchLabels"].values()))
        assert selected == [("linux", "amd64"), ("darwin", "amd64")]


def test_launcher_of_plugin_says_which_python_it_needs_when_there_is_none(tmp_path: Path) -> None:
    """An older python3 counts as none."""
    tools = tmp_path / "bin"
    tools.mkdir()
    for name in ("dirname", "readlink", "sh"):
        (tools / name).symlink_to(str(shutil.which(name)))
    old = tools / "python3"
    old.write_text("#!/bin/sh\necho 3.9\n")
    old.chmod(0o755)
    launcher = tmp_path / "kubectl-fenka"
    krew.write_launchers(tmp_path, ("3.11", "3.12"))
    done = subprocess.run(
        [launcher], env={"PATH": str(tools)}, capture_output=True, text=True, check=False
    )
    expected = "kubectl fenka needs Python 3.11 or 3.12 as python3, and found none: install one\n"
    assert (done.returncode, done.stderr) == (1, expected)


def test_bill_of_materials_has_the_locked_versions_and_the_wheels(release: Release) -> None:
    """Its bytes depend on the content alone."""
    wheel = release.wheel("x86_64")
    wheel.write_bytes(b"wheel")
    (path,) = manifest.write_sbom(release)
    document = json.loads(path.read_text())
    assert (document["bomFormat"], document["specVersion"]) == ("CycloneDX", "1.5")
    component = document["metadata"]["component"]
    assert (component["name"], component["version"]) == ("fenka", fenka.__version__)
    (reference,) = component["externalReferences"]
    assert reference["url"].endswith(wheel.name)
    assert reference["hashes"] == [{"alg": "SHA-256", "content": manifest.sha256(wheel)}]
    versions = {part["name"]: part["version"] for part in document["components"]}
    assert {"aiohttp", "msgspec", "grpcio", "highspy", "svelte", "uplot"} <= set(versions)
    assert "pytest" not in versions
    before = path.read_bytes()
    manifest.write_sbom(release)
    assert path.read_bytes() == before


def test_checksums_cover_all_files_and_are_signed_when_a_key_is_given(
    release: Release, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A signature of an earlier run does not stay beside other checksums."""
    (release.into / "chart").mkdir()
    (release.into / "chart" / "index").write_text("a")
    (release.into / "fenka.whl").write_text("b")
    (release.into / "SHA256SUMS.minisig").write_text("old")
    (sums,) = manifest.write_checksums(release)
    lines = [line.split("  ")[1] for line in sums.read_text().splitlines()]
    assert lines == ["chart/index", "fenka.whl"]
    subprocess.run(["sha256sum", "--check", "--quiet", sums], cwd=release.into, check=True)
    assert sorted(path.name for path in release.into.iterdir()) == [
        "SHA256SUMS",
        "chart",
        "fenka.whl",
    ]
    if not shutil.which("minisign"):
        pytest.skip("minisign is not installed")
    key, public = release.work / "key", release.work / "key.pub"
    make = ["minisign", "-G", "-W", "-p", str(public), "-s", str(key)]
    subprocess.run(make, check=True, capture_output=True)
    monkeypatch.setenv("FENKA_MINISIGN_KEY", str(key))
    assert [path.name for path in manifest.write_checksums(release)] == [
        "SHA256SUMS",
        "SHA256SUMS.minisig",
    ]
    verify = ["minisign", "-V", "-p", str(public), "-m", str(sums)]
    subprocess.run(verify, check=True, capture_output=True)
    sums.write_text("changed")
    assert subprocess.run(verify, check=False, capture_output=True).returncode != 0


@pytest.mark.skipif(not shutil.which("cosign"), reason="cosign is not installed")
def test_checksums_are_signed_with_cosign_without_a_transparency_log(
    release: Release, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its usual configuration comes from the network, as does the log."""
    monkeypatch.setenv("COSIGN_PASSWORD", "of the key")

    def cosign(*words: str) -> subprocess.CompletedProcess[bytes]:
        return subprocess.run(
            ["cosign", *words], check=False, capture_output=True, cwd=release.work
        )

    cosign("generate-key-pair")
    config = release.work / "signing.json"
    config.write_bytes(cosign("signing-config", "create").stdout)
    monkeypatch.setenv("FENKA_COSIGN_KEY", str(release.work / "cosign.key"))
    monkeypatch.setenv("FENKA_COSIGN_CONFIG", str(config))
    sums, bundle = manifest.write_checksums(release)
    verify = ["verify-blob", "--insecure-ignore-tlog", "--key", "cosign.pub", "--bundle"]
    assert cosign(*verify, str(bundle), str(sums)).returncode == 0
    sums.write_text("changed")
    assert cosign(*verify, str(bundle), str(sums)).returncode != 0


def test_missing_key_ends_the_release(release: Release, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who names a key expects signatures."""
    monkeypatch.setenv("FENKA_MINISIGN_KEY", str(release.work / "absent"))
    with pytest.raises(ReleaseError, match="minisign"):
        manifest.write_checksums(release)


@pytest.mark.slow
def test_wheel_for_every_computer_has_no_libraries_and_carries_man_pages(release: Release) -> None:
    """pip takes it where no wheel for the processor or the system fits."""
    wheels.build_wheels(Release(release.into, (), release.work))
    wheel = release.wheel("any")
    unpacked = release.work / "unpacked"
    shutil.unpack_archive(wheel, unpacked, "zip")
    names = {str(path.relative_to(unpacked)) for path in unpacked.rglob("*") if path.is_file()}
    assert "fenka/__main__.py" in names
    assert not {name for name in names if "_native" in name}
    share = f"fenka-{fenka.__version__}.data/data/share"
    assert f"{share}/man/man1/fenka-run.1" in names
    assert f"{share}/bash-completion/completions/fenka" in names
    command = [sys.executable, "-P", "-c", "from fenka.__main__ import main; main()", "run"]
    done = subprocess.run(
        [*command, "--gpu-mem", "4", "--", "true"],
        env={**os.environ, "PYTHONPATH": str(unpacked), "FENKA_RUNTIME": str(release.work / "run")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode != 0
    assert "this fenka has no native libraries, so it can look at clusters" in done.stderr
    assert len(done.stderr.splitlines()) == 1
