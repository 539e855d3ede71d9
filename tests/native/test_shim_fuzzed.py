"""libFuzzer, which learns from what its inputs reach, on what programs and agents may hand the shim.

Where it is not installed, test_shim_sanitized feeds the same targets inputs made by chance alone.
"""

import functools
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.native.clients import HERE, built, compile_c
from tests.native.test_shim_module_size import KERNEL, PTX, VARIABLES, cubin, entry, fat
from tests.native.test_shim_sanitized import INCLUDE, PAGE_PARTS, SHIM_SOURCE

FUZZER = ("-g", "-O1", "-std=gnu11", "-fsanitize=fuzzer,address,undefined")
WANTED = "libFuzzer is not installed (Debian 12: clang-14 and libclang-rt-14-dev)"


@functools.cache
def compiler() -> str:
    """A clang that has libFuzzer; skips where there is none."""
    versions = ["clang", *(f"clang-{number}" for number in range(30, 10, -1))]
    nothing = built() / "nothing.c"
    nothing.write_text("int LLVMFuzzerTestOneInput(const char *d, unsigned long n) { return 0; }")
    for name in filter(shutil.which, versions):
        command = [name, *FUZZER, "-w", str(nothing), "-o", str(built() / "nothing")]
        if subprocess.run(command, capture_output=True, check=False).returncode == 0:
            return name
    pytest.skip(WANTED)


def fuzz(program: Path, folder: Path, runs: int, *first: bytes) -> None:
    """So many inputs, the same in every run, from these; it ends with an error where one breaks anything."""
    corpus = folder / "corpus"
    corpus.mkdir()
    for number, data in enumerate(first):
        (corpus / str(number)).write_bytes(data)
    # A process begins with the peak of its parent's memory, so that limit says nothing here.
    limits = ("-timeout=0", "-rss_limit_mb=0", "-malloc_limit_mb=2048")
    ran = subprocess.run(
        [str(program), f"-runs={runs}", "-seed=1", "-max_len=1024", *limits, str(corpus)],
        env={"FENKA_FUZZ_FOLDER": str(folder), "ASAN_OPTIONS": "detect_leaks=0"},
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    assert f"Done {runs} runs" in ran.stderr, ran.stderr[-4000:]
    assert ran.returncode == 0


def test_shim_survives_arbitrary_pages(tmp_path: Path) -> None:
    """Control page and account: what is let in has limits, and sums hold."""
    sources = (*PAGE_PARTS, "-fno-sanitize-recover=all")
    flags = (*FUZZER, *INCLUDE, *sources)
    program = compile_c(HERE / "shim_fuzz.c", built() / "pages", *flags, compiler=compiler())
    fuzz(program, tmp_path, 30_000, b"\1\1", b"\0\0")


def test_module_size_survives_arbitrary_images(tmp_path: Path) -> None:
    """Cubins, PTX and fat binaries are read within their bounds; lazily they never take more."""
    sources = (str(SHIM_SOURCE / "module_size.c"), "-fno-sanitize-recover=all", "-DFUZZ")
    flags = (*FUZZER, *INCLUDE, *sources)
    program = compile_c(
        HERE / "shim_module_size.c", built() / "images", *flags, compiler=compiler()
    )
    good = cubin(KERNEL, VARIABLES), PTX.encode(), fat(entry(cubin(KERNEL)), entry(PTX.encode(), 1))
    fuzz(program, tmp_path, 60_000, *good)


def test_fuzzer_finds_a_planted_fault(tmp_path: Path) -> None:
    """It is really there, and learns: four bytes in a row are not found by chance."""
    source = tmp_path / "planted.c"
    source.write_text(
        "#include <stdlib.h>\n"
        "int LLVMFuzzerTestOneInput(const char *d, unsigned long n) {\n"
        "    if (n > 3 && d[0] == 'f' && d[1] == 'n' && d[2] == 'k' && d[3] == 'a') abort();\n"
        "    return 0;\n}\n"
    )
    program = compile_c(source, tmp_path / "planted", *FUZZER, compiler=compiler())
    with pytest.raises(AssertionError, match="deadly signal"):
        fuzz(program, tmp_path, 1_000_000)
