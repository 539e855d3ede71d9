"""Every way by which programs come by the driver's functions leads to the limit."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from fenka.isolation import lease_control
from tests.native.clients import CARDS, GIB, OUT_OF_MEMORY, SHIM, STYLES, Lease, built, compile_c

TOO_MUCH = int(4.1 * GIB)

PYTHON_CLIENTS = {
    "ctypes": """
import ctypes
cu = ctypes.CDLL("libcuda.so.1")
context, p = ctypes.c_void_p(), ctypes.c_ulonglong()
cu.cuInit(0), cu.cuCtxCreate_v2(ctypes.byref(context), 0, 0)
alloc = lambda n: cu.cuMemAlloc_v2(ctypes.byref(p), ctypes.c_size_t(n))
free = lambda: cu.cuMemFree_v2(p)
""",
    "cuda-bindings": """
from cuda.bindings import driver as cu
cu.cuInit(0), cu.cuCtxCreate(0, 0)
def alloc(n):
    global p
    code, p = cu.cuMemAlloc(n)
    return int(code)
free = lambda: int(cu.cuMemFree(p)[0])
""",
}


@pytest.mark.parametrize("style", STYLES.values(), ids=STYLES)
def test_limit_holds_however_functions_are_found(lease: Lease, style: int) -> None:
    """4.1 of 4 GiB is refused as the driver would, 3 GiB is granted, and freeing gives all back."""
    client = lease.start(style).enter()
    assert client.ask("alloc", TOO_MUCH).code == OUT_OF_MEMORY
    code, pointer, _ = client.ask("alloc", 3 * GIB)
    assert (code, lease.held()) == (0, 3 * GIB)
    assert client.ask("alloc", 2 * GIB).code == OUT_OF_MEMORY
    assert client.ask("free", pointer).code == 0
    assert lease.held() == 0
    assert client.ask("alloc", 4 * GIB).code == 0


@pytest.mark.parametrize("program", PYTHON_CLIENTS.values(), ids=PYTHON_CLIENTS)
def test_limit_holds_for_python(lease: Lease, program: str) -> None:
    """The same for the two ways by which Python calls the driver."""
    steps = f"print(alloc({TOO_MUCH}), alloc({3 * GIB}), free(), alloc({4 * GIB}))"
    ran = subprocess.run(
        [sys.executable, "-c", program + steps],
        env=lease.environment(),
        capture_output=True,
        text=True,
        check=True,
    )
    assert ran.stdout.split() == ["2", "0", "0", "0"]


@pytest.mark.parametrize("style", [3, 4, 5])
def test_address_is_replaced_by_name_when_it_has_no_symbol(lease: Lease, style: int) -> None:
    """A driver whose cuGetProcAddress answers with an internal address is still bounded."""
    client = lease.start(style, FENKA_NULL_INTERNAL="1").enter()
    assert client.ask("alloc", TOO_MUCH).code == OUT_OF_MEMORY
    assert client.ask("alloc", GIB).code == 0
    assert lease.held() == GIB


def test_later_version_with_another_signature_has_its_own_hook(
    tmp_path: Path, lease: Lease
) -> None:
    """From CUDA 13.0 on cuCtxSynchronize takes a context, which the hook of the first version would lose."""
    source = tmp_path / "driver.c"
    source.write_text(
        "#include <string.h>\n"
        "int cuInit(unsigned f) { return 0; } int cuCtxSynchronize(void) { return 9; }"
        "int cuCtxSynchronize_v2(void *c) { return c == (void *)42 ? 7 : 8; }"
        "int cuGetProcAddress_v2(const char *s, void **f, int v, unsigned long long o, void *q) {"
        ' *f = strcmp(s, "cuCtxSynchronize") ? 0'
        " : v >= 13000 ? (void *)cuCtxSynchronize_v2 : (void *)cuCtxSynchronize; return *f ? 0 : 500; }"
    )
    driver = tmp_path / "libcuda.so.1"
    compile_c(source, driver, "-shared", "-fPIC", "-Wl,-Bsymbolic", "-Wl,-soname,libcuda.so.1")
    out = run_c(
        tmp_path,
        lease,
        f'int main(void) {{ void *h = dlopen("{driver}", RTLD_NOW), *f;'
        "int (*get)(const char *, void **, int, unsigned long long, void *) ="
        ' dlsym(h, "cuGetProcAddress_v2");'
        'get("cuCtxSynchronize", &f, 13000, 0, 0); int late = ((int (*)(void *))f)((void *)42);'
        'get("cuCtxSynchronize", &f, 12000, 0, 0); int hooked = f != dlsym(h, "cuCtxSynchronize");'
        'printf("%d %d %d", late, ((int (*)(void))f)(), hooked); }',
    )
    assert out == "7 9 0"


def run_c(tmp_path: Path, lease: Lease, text: str, *flags: str) -> str:
    """Compiles and runs a program in the lease; what it printed."""
    source = tmp_path / "program.c"
    source.write_text("#define _GNU_SOURCE\n#include <dlfcn.h>\n#include <stdio.h>\n" + text)
    program = compile_c(source, tmp_path / "program", *flags, "-ldl")
    ran = subprocess.run(
        [str(program)],
        env=lease.environment(),
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    return ran.stdout


def test_limit_holds_when_a_library_is_bound_to_itself(tmp_path: Path, lease: Lease) -> None:
    """RTLD_DEEPBIND does not carry a library past the limit."""
    plugin = tmp_path / "plugin.c"
    plugin.write_text(
        "int cuInit(unsigned); int cuCtxCreate_v2(void **, unsigned, int);"
        "int cuMemAlloc_v2(void **, unsigned long);"
        "int use(unsigned long n) { void *c; cuInit(0); cuCtxCreate_v2(&c, 0, 0);"
        " return cuMemAlloc_v2(&c, n); }"
    )
    library = tmp_path / "plugin.so"
    compile_c(plugin, library, "-shared", "-fPIC", str(built() / "libcuda.so.1"))
    out = run_c(
        tmp_path,
        lease,
        f'int main(void) {{ void *h = dlopen("{library}", RTLD_NOW | RTLD_DEEPBIND);'
        f'int (*use)(unsigned long) = dlsym(h, "use"); printf("%d", use({TOO_MUCH}ul)); }}',
    )
    assert out == "2"


def test_lookup_in_the_whole_program_finds_hooks_only_when_a_driver_is_loaded(
    tmp_path: Path, lease: Lease
) -> None:
    """RTLD_DEFAULT and the program's own handle know cuInit only once a driver is loaded."""
    out = run_c(
        tmp_path,
        lease,
        """
        static void show(void) {
            printf("%d%d ", dlsym(RTLD_DEFAULT, "cuInit") != 0, dlsym(dlopen(0, RTLD_NOW), "cuInit") != 0);
        }
        int main(void) {
            show();
            if (!dlerror()) printf("silent ");
            dlopen("libcuda.so.1", RTLD_NOW | RTLD_GLOBAL);
            show();
        }""",
    )
    assert out == "00 11 "


def test_rtld_next_is_relative_to_the_caller(tmp_path: Path, lease: Lease) -> None:
    """RTLD_NEXT from a library that wraps a function of the one behind it finds that one."""
    chain = {
        "first": 'int (*next)(void) = dlsym(RTLD_NEXT, "answer"); return 1 + next();',
        "second": 'return dlvsym(RTLD_NEXT, "answer", "V") ? 99 : 20;',
    }
    libraries = []
    for name, body in chain.items():
        source = tmp_path / f"{name}.c"
        source.write_text(
            f"#define _GNU_SOURCE\n#include <dlfcn.h>\nint answer(void) {{ {body} }}\n"
        )
        libraries.append(
            str(compile_c(source, tmp_path / f"{name}.so", "-shared", "-fPIC", "-ldl"))
        )
    out = run_c(
        tmp_path,
        lease,
        'int answer(void); int main(void) { int (*a)(void) = dlsym(RTLD_DEFAULT, "answer");'
        'printf("%d %d", answer(), a()); }',
        "-Wl,--no-as-needed",
        *libraries,
    )
    assert out == "21 21"


def test_dlopen_uses_the_callers_runpath(tmp_path: Path, lease: Lease) -> None:
    """A library opened by name is found through the caller's own $ORIGIN, as without the shim."""
    source = tmp_path / "empty.c"
    source.write_text("int here = 7;")
    beside = tmp_path / "beside"
    beside.mkdir()
    compile_c(source, beside / "libbeside.so", "-shared", "-fPIC")
    out = run_c(
        tmp_path,
        lease,
        'int main(void) { void *h = dlopen("libbeside.so", RTLD_NOW);'
        'printf("%d", h ? *(int *)dlsym(h, "here") : 0); }',
        "-Wl,-rpath,$ORIGIN/beside",
    )
    assert out == "7"


def dynamic(*arguments: str) -> str:
    """What objdump says of the shim."""
    return subprocess.run(
        ["objdump", *arguments, str(SHIM)], capture_output=True, text=True, check=True
    ).stdout


def test_shim_needs_no_newer_glibc() -> None:
    """It needs libc only, and no symbol that is newer than glibc 2.17."""
    needed = {line.split()[1] for line in dynamic("-p").splitlines() if "NEEDED" in line}
    assert needed <= {"libc.so.6", "libdl.so.2", "libpthread.so.0", "ld-linux-x86-64.so.2"}
    versions = {
        tuple(map(int, word.strip("()").removeprefix("GLIBC_").split(".")))
        for word in dynamic("-T").split()
        if word.strip("()").startswith("GLIBC_")
    }
    assert versions
    assert max(versions) <= (2, 17)
    assert "_chk" not in dynamic("-T")


def test_musl_program_starts(tmp_path: Path) -> None:
    """Preloaded into a program of another C library, it does no harm and still finds that library's dlsym."""
    if not shutil.which("musl-gcc"):
        pytest.skip("musl-gcc is not installed (Debian: musl-tools)")
    source = tmp_path / "musl.c"
    source.write_text(
        "#include <dlfcn.h>\n#include <stdio.h>\nint main(void) {"
        ' puts(dlsym(RTLD_DEFAULT, "puts") && !dlsym(RTLD_DEFAULT, "cuInit") ? "fine" : "broken"); }'
    )
    program = tmp_path / "musl"
    subprocess.run(["musl-gcc", "-o", str(program), str(source)], check=True, capture_output=True)
    ran = subprocess.run(
        [str(program)], env={"LD_PRELOAD": str(SHIM)}, capture_output=True, text=True, check=False
    )
    assert (ran.stdout, ran.stderr, ran.returncode) == ("fine\n", "", 0)


@pytest.mark.parametrize("given", ["0,1", "1", "", None])
def test_environment_is_as_given_when_cuda_has_been_initialised(
    tmp_path: Path, lease: Lease, given: str | None
) -> None:
    """The program, a forked child and a child of a shell read what the program was started with."""
    lease_control.write(
        lease.control,
        lease_control.Control("test", tuple(lease_control.Limit(c, GIB) for c in CARDS[2:0:-1])),
    )
    source = tmp_path / "program.c"
    source.write_text(
        "#include <stdio.h>\n#include <stdlib.h>\n#include <unistd.h>\n#include <sys/wait.h>\n"
        "int cuInit(unsigned); int cuDeviceGetCount(int *);"
        "static void show(void) { int n = 0; cuDeviceGetCount(&n); char *v = getenv(NAME);"
        ' printf("%d %s\\n", n, v ? v : "unset"); fflush(stdout);'
        ' system("echo ${" NAME "-unset}"); }'
        "int main(void) { cuInit(0); show(); if (!fork()) { cuInit(0); show(); _exit(0); } wait(0);"
        " cuInit(0); show(); }"
    )
    program = compile_c(
        source,
        tmp_path / "program",
        '-DNAME="CUDA_VISIBLE_DEVICES"',
        str(built() / "libcuda.so.1"),
    )
    ran = subprocess.run(
        [str(program)],
        env=lease.environment(**({} if given is None else {"CUDA_VISIBLE_DEVICES": given})),
        capture_output=True,
        text=True,
        check=True,
    )
    shown = "unset" if given is None else given
    devices = 2 if given is None else len(given.split(",")) if given else 0
    assert ran.stdout.splitlines() == [f"{devices} {shown}", shown] * 3
    assert ran.stderr == ""


def test_cuinit_returns_when_the_driver_calls_it_again(tmp_path: Path, lease: Lease) -> None:
    """Libraries that a driver loads in its cuInit, as profilers are, may call cuInit themselves."""
    source = tmp_path / "driver.c"
    source.write_text(
        "#define _GNU_SOURCE\n#include <dlfcn.h>\n#include <string.h>\n"
        "int cuInit(unsigned f) { static int calls; if (calls++) return 0;"
        ' return ((int (*)(unsigned))dlsym(RTLD_DEFAULT, "cuInit"))(f); }'
        "int cuDeviceGetCount(int *n) { *n = 1; return 0; }"
        'int cuDeviceGetUuid_v2(char *id, int d) { memcpy(id, "\\0\\0\\0\\0\\0\\0\\0\\0'
        '\\0\\0\\0\\0\\0\\0\\0\\1", 16); return 0; }'
    )
    driver = tmp_path / "libcuda.so.1"
    compile_c(source, driver, "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1")
    out = run_c(
        tmp_path,
        lease,
        f'int main(void) {{ void *h = dlopen("{driver}", RTLD_NOW | RTLD_GLOBAL);'
        ' printf("%d", ((int (*)(unsigned))dlsym(h, "cuInit"))(0)); }',
    )
    assert out == "0"


def test_program_is_unaffected_when_it_uses_no_gpu(tmp_path: Path) -> None:
    """No lease, no CUDA call: no word, and nothing changed in the environment."""
    ran = subprocess.run(
        [sys.executable, "-c", "import os; print(os.environ.get('CUDA_VISIBLE_DEVICES'))"],
        env={"LD_PRELOAD": str(SHIM), "FENKA_NULL_CARDS": CARDS[0]},
        capture_output=True,
        text=True,
        check=True,
    )
    assert (ran.stdout, ran.stderr) == ("None\n", "")
