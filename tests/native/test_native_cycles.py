"""Neither the shim's nor the simulated driver's files include, or call, each other in circles."""

import graphlib
import re
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

import pytest

from tests.native.clients import HERE, compile_c

NATIVE = HERE.parent.parent / "native"
FOLDERS = ("shim", "simdriver")
BUILT = NATIVE / "build"


def includes(folder: Path) -> dict[str, set[str]]:
    """Return each header's own headers, by path below the folder."""
    graph = {}
    for path in folder.rglob("*.h"):
        named = re.findall(r'^#include "(.+)"', path.read_text(), re.MULTILINE)
        found = ((path.parent / name).resolve() for name in named)
        graph[str(path)] = {str(header) for header in found if header.is_file()}
    return graph


def symbols(objects: Iterable[Path]) -> dict[str, set[str]]:
    """Return for each object file the other ones whose symbols it uses, as `nm` lists them."""
    defined: dict[str, str] = {}
    undefined: dict[str, set[str]] = {}
    for path in objects:
        listed = subprocess.run(["nm", "-Pg", path], check=True, capture_output=True, text=True)
        undefined[path.stem] = set()
        for name, kind, *_ in map(str.split, listed.stdout.splitlines()):
            if kind in "Uvw":
                undefined[path.stem].add(name)
            else:
                defined[name] = path.stem
    return {
        name: {defined[it] for it in used if it in defined} - {name}
        for name, used in undefined.items()
    }


def assert_no_cycle(graph: Mapping[str, Iterable[str]]) -> None:
    """Fail with the cycle, if there is one."""
    assert graph
    graphlib.TopologicalSorter(graph).prepare()


def compiled(folder: Path, output: Path) -> list[Path]:
    """Compile each source of a folder; the build's own objects may be bitcode."""
    zig = f"{sys.executable} -m ziglang cc"
    flags = ("-c", "-O0", "-fPIC", "-std=gnu11", f"-I{NATIVE / 'include'}")
    return [
        compile_c(source, output / f"{source.stem}.o", *flags, compiler=zig)
        for source in sorted(folder.glob("*.c"))
    ]


@pytest.mark.parametrize("folder", FOLDERS)
def test_headers_do_not_include_each_other_in_circles(folder: str) -> None:
    """Include guards would hide it."""
    assert_no_cycle(includes(NATIVE / folder))


def test_shim_files_do_not_call_each_other_in_circles(tmp_path: Path) -> None:
    """State that several files need has a file of its own."""
    assert_no_cycle(symbols(compiled(NATIVE / "shim", tmp_path)))


@pytest.mark.parametrize("library", ["cuda", "nvml"])
def test_simulated_driver_files_do_not_call_each_other_in_circles(library: str) -> None:
    """One library links one family of functions."""
    other = {"cuda": "nvml", "nvml": "cuda"}[library]
    sources = (NATIVE / "simdriver").glob("*.c")
    names = (source.stem for source in sources if not source.stem.startswith(other))
    objects = (BUILT / "simdriver" / f"{name}.o" for name in names)
    assert_no_cycle(symbols(path for path in objects if path.exists()))


def test_cycle_is_found_when_two_files_call_each_other(tmp_path: Path) -> None:
    """The check itself is checked."""
    for name, calls in (("a", "b"), ("b", "a")):
        source = tmp_path / f"{name}.c"
        source.write_text(f"void {calls}(void);\nvoid {name}(void) {{ {calls}(); }}\n")
        compile_c(source, tmp_path / f"{name}.o", "-c")
    with pytest.raises(graphlib.CycleError):
        assert_no_cycle(symbols(tmp_path.glob("*.o")))
