"""What code takes of a card, as the shim reads it out of the image."""

import random
import re
import struct
import subprocess
from pathlib import Path

import pytest

from tests.native import clients
from tests.native.clients import HERE, MIB, built, compile_c
from tests.native.test_shim_sanitized import INCLUDE, SHIM_SOURCE

UNKNOWN = 2 * MIB

ALLOCATED, EXECUTABLE, WRITABLE = 2, 4, 1
PROGBITS, STRTAB, NOBITS = 1, 3, 8

# name, type, flags, size
KERNEL = (".text.kernel", PROGBITS, ALLOCATED | EXECUTABLE, 256)
PARAMETERS = (".nv.constant0.kernel", PROGBITS, ALLOCATED, 360)
CONSTANTS = (".nv.constant3", PROGBITS, ALLOCATED, 16)
VARIABLES = (".nv.global", NOBITS, ALLOCATED | WRITABLE, 3 << 30)
SHARED = (".nv.shared.kernel", NOBITS, ALLOCATED | WRITABLE, 4096)
NOTES = (".nv.info", 0x70000000, 0, 36)
DUPLICATE = (".nv.merc.nv.constant.user", 0x7000007C, ALLOCATED, 16)

Section = tuple[str, int, int, int]


def cubin(*sections: Section, machine: int = 190) -> bytes:
    """An ELF file with these sections, all of whose content is zero."""
    all_of_them = (("", 0, 0, 0), (".shstrtab", STRTAB, 0, 0), *sections)
    names, places = b"", []
    for name, *_ in all_of_them:
        places.append(len(names))
        names += name.encode() + b"\0"
    table, at = b"", 64 + 64 * len(all_of_them)
    body = names
    for (name, kind, flags, size), place in zip(all_of_them, places, strict=True):
        shown = len(names) if name == ".shstrtab" else size
        table += struct.pack("<IIQQQQIIQQ", place, kind, flags, 0, at, shown, 0, 0, 1, 0)
    header = b"\x7fELF\x02\x01\x01" + bytes(9)
    header += struct.pack(
        "<HHIQQQIHHHHHH", 2, machine, 1, 0, 0, 64, 0, 64, 0, 0, 64, len(all_of_them), 1
    )
    return header + table + body


def entry(image: bytes, kind: int = 2, unpacked: int = 0) -> bytes:
    """One image of a fat binary, padded to 8 bytes."""
    padded = image + bytes(-len(image) % 8)
    header = struct.pack(
        "<HHIQIIHHIIIQQQ",
        kind,
        257,
        64,
        len(padded),
        len(image),
        0,
        7,
        1,
        75,
        0,
        0,
        17,
        0,
        unpacked,
    )
    return header + padded


def fat(*entries: bytes) -> bytes:
    """A fat binary of these."""
    body = b"".join(entries)
    return struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(body)) + body


def read(image: bytes, folder: Path, given: str = "data", mode: str = "eager") -> int:
    """What the shim makes of it; ends with an error where it reads beyond."""
    program = built() / "image"
    if not program.exists():
        flags = ["-g", *INCLUDE, str(SHIM_SOURCE / "module_size.c")]
        flags += ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
        compile_c(HERE / "shim_module_size.c", program, *flags)
    path = folder / "image"
    path.write_bytes(image)
    said = subprocess.run(
        [str(program), str(path), given, mode], capture_output=True, text=True, check=False
    )
    assert said.stderr == ""
    return int(said.stdout)


@pytest.mark.parametrize("given", ["data", "file"])
def test_cubin_size_is_its_loaded_sections(tmp_path: Path, given: str) -> None:
    """Code, constants and variables; not what lies in the chip, nor what tools read."""
    image = cubin(KERNEL, PARAMETERS, CONSTANTS, VARIABLES, SHARED, NOTES, DUPLICATE)
    assert read(image, tmp_path, given) == 256 + 360 + 16 + (3 << 30)
    assert read(image, tmp_path, given, "lazy") == 256 + 360 + 16 + (3 << 30)


PTX = """//
.version 7.0
.target sm_75
.address_size 64
.visible .global .align 4 .b8 big[1048576];
.global .align 8 .u64 pair[2][3];         // .global .u64 comment[1000];
.global .attribute(.managed) .align 4 .v2 .f32 points[0x10], one;
.const .align 4 .f32 k[] = {1.0, 2.0, 0f3F800000, 4.0};
.global .u16 table[][2] = {{1, 2}, {3, 4}, {5, 6}};
.extern .global .align 4 .b8 elsewhere[4096]; /* .global .b64 z[9]; */
.visible .entry kernel(.param .u64 .ptr .global .align 4 p) {
 .reg .u64 %rd<4>; .shared .align 4 .b8 shared[4096];
 ld.param.u64 %rd1, [p]; cvta.to.global.u64 %rd2, %rd1; st.global.u64 [%rd2], %rd1;
 ret;
}
"""


@pytest.mark.parametrize("given", ["data", "file"])
def test_ptx_size_is_its_length_and_variables(tmp_path: Path, given: str) -> None:
    """1 MiB, 2x3 of 8, 16 and one of 2x4, 4 of 4, and 3x2 of 2 bytes."""
    variables = MIB + 2 * 3 * 8 + (16 + 1) * 8 + 4 * 4 + 6 * 2
    assert read(PTX.encode(), tmp_path, given) == len(PTX) + variables


@pytest.mark.parametrize(
    "dimension",
    ["[1<<30]", "[(1 << 30)]", "[2*3]", "[0b1000]", "[010]", "[N]", "<1<<20>", "[4][-1]"],
)
def test_ptx_size_is_unknown_when_a_dimension_is_no_plain_number(
    tmp_path: Path, dimension: str
) -> None:
    """The driver is asked once it has loaded the image. What follows the variable is read as usual."""
    text = f".global .b8 a{dimension};\n.global .b64 b[8], c = 5 << 3;\n"
    taken = read(text.encode(), tmp_path) - len(text)
    assert 0 <= taken - UNKNOWN - 9 * 8 <= 4


def test_numbered_variables_are_counted(tmp_path: Path) -> None:
    """a<100> declares a0 to a99."""
    text = ".global .b64 a<100>, b;"
    assert read(text.encode(), tmp_path) == len(text) + 101 * 8


def test_ptx_and_its_cubin_have_equal_variables(tmp_path: Path) -> None:
    """NVIDIA's own assembler keeps what is visible: the same variables, and some bytes of code."""
    ptxas = clients.wheel_folder("cuda_nvcc") / "bin" / "ptxas"
    if not ptxas.exists():
        pytest.skip("the wheel nvidia-cuda-nvcc-cu12, which has ptxas, is not installed")
    text = re.sub(r"^\.(global|const)", r".visible .\1", PTX, flags=re.M).replace(".extern", "//")
    source = tmp_path / "program.ptx"
    source.write_text(text.replace(" .attribute(.managed)", ""))
    command = [str(ptxas), "-arch", "sm_75", str(source), "-o", str(tmp_path / "out")]
    subprocess.run(command, check=True, capture_output=True)
    compiled = read((tmp_path / "out").read_bytes(), tmp_path)
    variables = read(text.encode(), tmp_path) - len(text)
    assert variables > MIB
    assert variables <= compiled < variables + 4096


def test_fat_binary_size_is_its_largest_image(tmp_path: Path) -> None:
    """The driver loads one of them; lazily, kernels come later and its variables at once."""
    data = (".nv.global", NOBITS, ALLOCATED | WRITABLE, 5000)
    image = fat(
        entry(cubin(KERNEL)), entry(cubin(KERNEL, PARAMETERS, data)), entry(b".version 7.0 ", 1)
    )
    assert read(image, tmp_path) == 256 + 360 + 5000
    assert read(image, tmp_path, "file") == 256 + 360 + 5000
    assert read(image, tmp_path, mode="lazy") == 5000


def test_compressed_image_size_is_its_unpacked_size(tmp_path: Path) -> None:
    """What is in it is not seen."""
    image = fat(entry(b"\xa2\x7fELF and so on", unpacked=532096), entry(cubin(KERNEL)))
    assert read(image, tmp_path) == 532096
    assert read(image, tmp_path, mode="lazy") == 0


@pytest.mark.parametrize(
    ("image", "taken"),
    [
        (b"", 0),
        (b"\x7fEL", UNKNOWN),
        (b"an image", UNKNOWN),
        (b"BC\xc0\xde of LLVM", UNKNOWN),
        (cubin(KERNEL, machine=62), UNKNOWN),
        (cubin(VARIABLES, (".nv.global.more", NOBITS, ALLOCATED, 2**64 - 1)), 2**64 - 1),
        (b".global .b8 x[18446744073709551615][9];", 2**64 - 1),
    ],
)
def test_unknown_image_has_the_default_size(tmp_path: Path, image: bytes, taken: int) -> None:
    """And sums beyond 64 bits are the largest of them, which no slice can hold."""
    assert read(image, tmp_path, "file") == taken


def test_module_size_survives_arbitrary_files(tmp_path: Path) -> None:
    """Truncated and scribbled files are read within their bounds: the sanitizer has nothing to say."""
    chance = random.Random(4)
    good = [cubin(KERNEL, VARIABLES, SHARED), fat(entry(cubin(KERNEL)), entry(PTX.encode(), 1))]
    for turn in range(60):
        image = bytearray(good[turn % 2] if turn % 3 else PTX.encode())
        for _ in range(chance.randrange(4)):
            image[chance.randrange(min(len(image), 300))] = chance.choice([0, 1, 0x7F, 0xFF])
        read(bytes(image[: chance.randrange(1, len(image) + 1)]), tmp_path, "file")
