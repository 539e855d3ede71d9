"""The proxy: the shim under the driver's own name, where nothing is preloaded."""

import functools
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from fenka.hardware.card_spec import parse_spec
from fenka.hardware.simulated_node import SimulatedNode
from fenka.isolation import account
from fenka.isolation.lease_control import Limit
from fenka.isolation.proxy_install import (
    LIBRARIES,
    InvalidLibrary,
    UnknownFunctions,
    exported_functions,
    install,
    unknown_functions,
)
from tests.cli.command import fenka
from tests.native.clients import (
    CARDS,
    GIB,
    NULL_DRIVER,
    OUT_OF_MEMORY,
    SHIM,
    STYLES,
    Client,
    Lease,
    built,
    client,
    compile_c,
)
from tests.native.test_shim_interception import PYTHON_CLIENTS

TOO_MUCH = int(4.1 * GIB)
PROXY = SHIM.parent / "proxy"
NOT_INITIALIZED = 3
NOT_FOUND = 500
NVML_LIBRARY_NOT_FOUND = 12

FOUND = {name: style for name, style in STYLES.items() if name != "dlvsym"}
"""Drivers give their symbols no versions, so nobody finds one by dlvsym."""

LINKED = "-Wl,-soname,libcuda.so.1"


@functools.cache
def null_driver(extra: str = "") -> Path:
    """A directory with both null drivers, without symbol versions, as the real ones are.

    extra: C that is added to libcuda: what a newer driver has.
    """
    folder = built() / f"plain{abs(hash(extra))}"
    folder.mkdir()
    source = folder / "driver.c"
    source.write_text(f'#include "{NULL_DRIVER}"\n{extra}\n')
    compile_c(source, folder / "libcuda.so.1", "-shared", "-fPIC", "-Wl,-Bsymbolic", LINKED)
    shutil.copy(built() / "libnvidia-ml.so.1", folder)
    return folder


@functools.cache
def linked_client() -> Path:
    """The client that is linked against libcuda.so.1."""
    driver, output = null_driver() / "libcuda.so.1", null_driver() / "client0"
    source = Path(__file__).parent / "shim_client.c"
    return compile_c(source, output, "-DSTYLE=0", str(driver), "-ldl", "-pthread")


@dataclass
class Stand:
    """A lease of 4 GiB, and a directory where the proxy stands in front of a driver in another."""

    lease: Lease
    placed: Path
    driver: Path

    def environment(self, **more: str) -> dict[str, str]:
        """Without any preload."""
        placed = {"LD_PRELOAD": "", "LD_LIBRARY_PATH": str(self.placed)}
        return self.lease.environment(**{**placed, **more})

    def start(self, style: int, **more: str) -> Client:
        """A client that comes by its functions in this way; it ends with the test."""
        program = client(style) if style else linked_client()
        self.lease.clients.append(Client(program, self.environment(**more)))
        return self.lease.clients[-1]

    def run(self, program: Path | str, *arguments: str, **more: str) -> str:
        """What a program prints that is meant to say nothing to standard error."""
        ran = subprocess.run(
            [str(program), *arguments],
            env=self.environment(**more),
            capture_output=True,
            text=True,
            check=False,
        )
        assert ran.stderr == ""
        assert ran.returncode == 0
        return ran.stdout


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SimulatedNode]:
    """One T4 of 15079 MiB."""
    made = SimulatedNode.create(tmp_path_factory.mktemp("node"), parse_spec("T4"))
    made.start()
    yield made
    made.stop()


@pytest.fixture
def null(tmp_path: Path, lease: Lease) -> Stand:
    """In front of the null driver, which refuses nothing."""
    install(tmp_path / "placed", null_driver())
    return Stand(lease, tmp_path / "placed", null_driver())


@pytest.fixture
def simulated(tmp_path: Path, node: SimulatedNode) -> Iterator[Stand]:
    """In front of the simulated driver, which keeps its own account."""
    found = subprocess.run(
        [sys.executable, "-c", UUID],
        env={"LD_LIBRARY_PATH": str(node.library_dir)},
        capture_output=True,
        text=True,
        check=True,
    )
    lease = Lease(tmp_path / "simulated", (Limit(found.stdout.strip(), 4 * GIB),))
    install(tmp_path / "placed", node.library_dir)
    yield Stand(lease, tmp_path / "placed", node.library_dir)
    lease.close()


UUID = """
import pynvml as n
n.nvmlInit()
print(n.nvmlDeviceGetUUID(n.nvmlDeviceGetHandleByIndex(0)))
"""


@pytest.fixture(params=["null", "simulated"])
def stand(request: pytest.FixtureRequest) -> Stand:
    """Each of the two."""
    found = request.getfixturevalue(request.param)
    assert isinstance(found, Stand)
    return found


def holds(lease: Lease, client: Client) -> None:
    """4.1 of 4 GiB is refused, 3 GiB is granted and charged once, and freeing gives all back."""
    client.enter()
    assert client.ask("alloc", TOO_MUCH).code == OUT_OF_MEMORY
    code, pointer, _ = client.ask("alloc", 3 * GIB)
    assert (code, lease.held()) == (0, 3 * GIB)
    assert client.ask("info")[1:] == (GIB, 4 * GIB)
    assert client.ask("alloc", 2 * GIB).code == OUT_OF_MEMORY
    assert client.ask("free", pointer).code == 0
    assert lease.held() == 0
    code, pointer, _ = client.ask("alloc", 4 * GIB)
    assert (code, client.ask("free", pointer).code, lease.held()) == (0, 0, 0)


@pytest.mark.parametrize("style", FOUND.values(), ids=FOUND)
def test_limit_holds_however_functions_are_found(stand: Stand, style: int) -> None:
    """Nothing is preloaded; the program finds the proxy where it looks for the driver."""
    started = stand.start(style)
    holds(stand.lease, started)
    assert started.finish() == ""


@pytest.mark.parametrize("program", PYTHON_CLIENTS.values(), ids=PYTHON_CLIENTS)
def test_limit_holds_for_python(stand: Stand, program: str) -> None:
    """The same for the two ways by which Python calls the driver."""
    steps = f"print(alloc({TOO_MUCH}), alloc({3 * GIB}), free(), alloc({4 * GIB}), free())"
    assert stand.run(sys.executable, "-c", program + steps).split() == ["2", "0", "0", "0", "0"]
    assert stand.lease.held() == 0


USE = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
typedef int (*create)(void **, unsigned, int);
typedef int (*alloc)(void **, unsigned long);
typedef int (*drop)(void *);
static void use(int (*init)(unsigned), create c, alloc a, drop f) {
    void *context, *p, *q = 0;
    int codes[] = {init(0), c(&context, 0, 0), a(&p, TOO_MUCHul), a(&p, 3ul << 30), a(&q, 2ul << 30), f(p),
                   a(&p, 4ul << 30), f(p)};
    for (int i = 0; i < 8; i++)
        printf("%d ", codes[i]);
}
static void use_handle(void *h) {
    if (!h)
        puts(dlerror());
    use((int (*)(unsigned))dlsym(h, "cuInit"), (create)dlsym(h, "cuCtxCreate_v2"),
        (alloc)dlsym(h, "cuMemAlloc_v2"), (drop)dlsym(h, "cuMemFree_v2"));
}
""".replace("TOO_MUCH", str(TOO_MUCH))

USED = "0 0 2 0 2 0 0 0 "
"""What `use` prints under a limit of 4 GiB that charges once and gives back."""

PLUGIN = """
int cuInit(unsigned); int cuCtxCreate_v2(void **, unsigned, int);
int cuMemAlloc_v2(void **, unsigned long); int cuMemFree_v2(void *);
void run(void) { use(cuInit, cuCtxCreate_v2, cuMemAlloc_v2, cuMemFree_v2); }
"""


def c(output: Path, text: str, *flags: str) -> Path:
    """Compiles a program, or a library by its flags."""
    source = output.with_suffix(".c")
    source.write_text(text)
    return compile_c(source, output, *flags, "-ldl")


PRELOADS = pytest.mark.parametrize("preload", ["", str(SHIM)], ids=["alone", "preloaded too"])


@PRELOADS
def test_limit_holds_when_the_proxy_is_loaded_by_its_path(
    tmp_path: Path, stand: Stand, preload: str
) -> None:
    """A program that searches nowhere and opens the library by its absolute path."""
    path = stand.placed / "libcuda.so.1"
    program = c(
        tmp_path / "p", USE + f'int main(void) {{ use_handle(dlopen("{path}", RTLD_NOW)); }}'
    )
    assert stand.run(program, LD_LIBRARY_PATH="", LD_PRELOAD=preload) == USED


@PRELOADS
def test_limit_holds_when_a_library_is_bound_to_itself(
    tmp_path: Path, stand: Stand, preload: str
) -> None:
    """RTLD_DEEPBIND leads to the proxy, with no dlopen of ours to strip it."""
    driver = null_driver() / "libcuda.so.1"
    plugin = c(tmp_path / "plugin.so", USE + PLUGIN, "-shared", "-fPIC", str(driver))
    program = c(
        tmp_path / "p",
        USE + f'int main(void) {{ void *h = dlopen("{plugin}", RTLD_NOW | RTLD_DEEPBIND);'
        " if (!h) puts(dlerror());"
        ' ((void (*)(void))dlsym(h, "run"))(); }',
    )
    assert stand.run(program, LD_PRELOAD=preload) == USED


@PRELOADS
def test_limit_holds_in_another_linker_namespace(
    tmp_path: Path, stand: Stand, preload: str
) -> None:
    """dlmopen: a proxy in a namespace of its own; a shim before it looks through it and charges alone."""
    path = stand.placed / "libcuda.so.1"
    program = c(
        tmp_path / "p",
        USE + f'int main(void) {{ use_handle(dlmopen(LM_ID_NEWLM, "{path}", RTLD_NOW)); }}',
    )
    # Each namespace has an environment of its own: the shim writes to that of the driver.
    assert stand.run(program, LD_PRELOAD=preload, FENKA_NULL_CARDS=f"{CARDS[1]},{CARDS[0]}") == USED


def test_dlvsym_finds_what_it_finds_in_a_driver(tmp_path: Path, stand: Stand) -> None:
    """No version is one of the driver's, so none leads past the proxy."""
    program = c(
        tmp_path / "p",
        USE
        + 'int main(void) { void *h = dlopen("libcuda.so.1", RTLD_NOW);'
        + ' const char *versions[] = {"DRIVER_1", "Base", "libcuda.so.1", "GLIBC_2.2.5"};'
        + ' for (int i = 0; i < 4; i++) printf("%d", dlvsym(h, "cuMemAlloc_v2", versions[i]) != 0); }',
    )
    assert stand.run(program) == "0000"
    assert stand.run(program, LD_LIBRARY_PATH=str(stand.driver)) == "0000"


@pytest.mark.parametrize("first", ["here", "there"])
def test_linker_namespaces_share_one_slot(tmp_path: Path, stand: Stand, first: str) -> None:
    """A process with two copies of the shim pays for both, and neither takes the other's for a dead one's."""
    path = stand.placed / "libcuda.so.1"
    calls = {
        "here": "void *g = dlopen(PATH, RTLD_NOW);"
        "a[0] = (alloc)dlsym(g, NAME); f[0] = (drop)dlsym(g, FREE);"
        "enter(g); a[0](&p[0], 1ul << 30);",
        "there": "void *h = dlmopen(LM_ID_NEWLM, PATH, RTLD_NOW);"
        "a[1] = (alloc)dlsym(h, NAME); f[1] = (drop)dlsym(h, FREE); enter(h); a[1](&p[1], 2ul << 30);",
    }
    second = "there" if first == "here" else "here"
    program = c(
        tmp_path / "p",
        USE
        + f'#define PATH "{path}"\n#define NAME "cuMemAlloc_v2"\n#define FREE "cuMemFree_v2"\n'
        + 'static void enter(void *h) { void *c; ((int (*)(unsigned))dlsym(h, "cuInit"))(0);'
        + ' ((create)dlsym(h, "cuCtxCreate_v2"))(&c, 0, 0); }'
        + "int main(void) { alloc a[2]; drop f[2]; void *p[2] = {0};"
        + calls[first]
        + calls[second]
        + ' puts("taken"); fflush(stdout); getchar();'
        + ' printf("%d %d ", a[0](&p[0], 1ul << 31), a[1](&p[1], 1ul << 31));'
        + ' printf("%d %d\\n", f[0](p[0]), f[1](p[1])); fflush(stdout); getchar(); }',
    )
    with subprocess.Popen(
        [str(program)],
        env=stand.environment(FENKA_NULL_CARDS=CARDS[0]),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdin
        assert process.stdout
        assert process.stdout.readline() == "taken\n"
        assert stand.lease.held() == 3 * GIB
        assert len(account.read(stand.lease.account).processes) == 1
        process.stdin.write("\n")
        process.stdin.flush()
        assert process.stdout.readline() == "2 2 0 0\n"
        assert stand.lease.held() == 0


def in_own_run(tmp_path: Path, lease: Lease, program: Path, start: str = "env -i") -> Path:
    """A script that starts the program in an empty environment, the lease's folder being /run/fenka."""
    unshare = ["unshare", "--mount"] if os.geteuid() == 0 else ["unshare", "--mount", "-r"]
    if subprocess.run([*unshare, "true"], capture_output=True, check=False).returncode:
        pytest.skip("this machine makes no private mount namespace")
    script = tmp_path / "script"
    script.write_text(
        f"#!/bin/sh\nexec {' '.join(unshare)} sh -c 'mount -t tmpfs none /run && mkdir /run/fenka &&"
        f" mount --bind {lease.folder} /run/fenka && exec {start} {program}'\n"
    )
    script.chmod(0o755)
    return script


def test_limit_holds_when_the_environment_is_empty(tmp_path: Path, simulated: Stand) -> None:
    """env -i, no ld.so.preload: lease, driver and shim are found by their places."""
    source = Path(__file__).parent / "shim_client.c"
    program = compile_c(
        source,
        tmp_path / "client",
        "-DSTYLE=0",
        str(null_driver() / "libcuda.so.1"),
        f"-Wl,-rpath,{simulated.placed}",
        "-ldl",
        "-pthread",
    )
    simulated.lease.clients.append(Client(in_own_run(tmp_path, simulated.lease, program), {}))
    holds(simulated.lease, simulated.lease.clients[-1])


def test_proxy_finds_the_driver_of_the_lease(
    tmp_path: Path, node: SimulatedNode, simulated: Stand
) -> None:
    """/run/fenka/driver comes before what stands beside the proxy, and needs nothing beside it."""
    folder = simulated.lease.folder
    (folder / "driver").symlink_to(node.library_dir)
    for name in ("state", "server.sock"):
        (folder / name).symlink_to(node.directory / name)
    install(tmp_path / "alone", tmp_path / "nothing")
    program = c(
        tmp_path / "p",
        USE
        + f'int main(void) {{ use_handle(dlopen("{tmp_path}/alone/libcuda.so.1", RTLD_NOW)); }}',
    )
    script = in_own_run(tmp_path, simulated.lease, program)
    assert simulated.run(script) == USED


def test_setuid_program_is_limited(tmp_path: Path, node: SimulatedNode, simulated: Stand) -> None:
    """setuid: the linker trusts neither the environment nor $ORIGIN, and finds what the lease has."""
    if os.geteuid() != 0 or not shutil.which("setpriv"):
        pytest.skip("only root, with setpriv, can give up and take identities")
    folder = simulated.lease.folder
    (folder / "driver").symlink_to(node.library_dir)
    for name in ("state", "server.sock"):
        (folder / name).symlink_to(node.directory / name)
    install(folder / "placed", tmp_path / "nothing")
    for library in (folder / "placed").glob("libfenka*.so"):
        library.rename(folder / "lease" / library.name)
    driver = str(null_driver() / "libcuda.so.1")
    text = USE + PLUGIN.replace("void run(void)", "#include <unistd.h>\nint main(void)").replace(
        "; }", '; printf("%d%d", getuid() > 0, geteuid()); }'
    )
    program = c(folder / "program", text, driver, "-Wl,-rpath,/run/fenka/placed")
    program.chmod(0o4755)
    start = f"env -i {shutil.which('setpriv')} --reuid=65534 --clear-groups"
    script = in_own_run(tmp_path, simulated.lease, Path("/run/fenka/program"), start)
    assert simulated.run(script) == USED + "10"


def test_nvml_and_cuda_proxies_share_one_account(stand: Stand) -> None:
    """With both proxies in a process there is one slot, and NVML shows what CUDA took."""
    out = stand.run(
        sys.executable,
        "-c",
        PYTHON_CLIENTS["ctypes"]
        + f"alloc({3 * GIB})\n"
        + "import pynvml as n\nn.nvmlInit()\nm = n.nvmlDeviceGetMemoryInfo(n.nvmlDeviceGetHandleByIndex(0))\n"
        + f"print(n.nvmlDeviceGetCount(), m.used, m.total, alloc({2 * GIB}))",
        FENKA_NULL_PIDS="",
    )
    assert out.split() == ["1", str(3 * GIB), str(4 * GIB), "2"]


@pytest.mark.parametrize("style", FOUND.values(), ids=FOUND)
def test_allocation_is_charged_once_when_the_shim_is_preloaded_too(
    tmp_path: Path, stand: Stand, style: int
) -> None:
    """Another copy of the shim is preloaded: one of the two charges, once, in one slot."""
    other = str(shutil.copy(SHIM, tmp_path / "other.so"))
    started = stand.start(style, LD_PRELOAD=other)
    holds(stand.lease, started)
    maps = Path(f"/proc/{started.process.pid}/maps").read_text()
    assert other in maps
    assert str(stand.placed / "libfenka.so") not in maps
    assert str(stand.placed / "libcuda.so.1") in maps
    assert len(account.read(stand.lease.account).processes) == 1


NEWER = """
int cuBrandNew(int n) { return n + 1; }
CUresult cuMemAlloc_v3(CUdeviceptr *p, size_t n) { return cuMemAlloc_v2(p, n); }
"""


@pytest.fixture
def newer(tmp_path: Path, lease: Lease) -> Stand:
    """In front of a driver that has functions which nobody knew when the proxy was built."""
    install(tmp_path / "placed", null_driver(NEWER))
    return Stand(lease, tmp_path / "placed", null_driver(NEWER))


CALL_NEW = "int cuBrandNew(int); static int (*pointer)(int) = cuBrandNew;"


def from_plugin(mode: str) -> Callable[[Path, str], str]:
    """A program whose plugin is linked against the newer driver and loaded in this mode."""

    def text(folder: Path, driver: str) -> str:
        plugin = c(
            folder / "plugin.so",
            USE + CALL_NEW + PLUGIN.replace("; }", '; printf("%d", pointer(6)); }'),
            "-shared",
            "-fPIC",
            driver,
        )
        return (
            f'int main(void) {{ void *h = dlopen("{plugin}", RTLD_NOW | {mode});'
            ' if (!h) puts(dlerror()); ((void (*)(void))dlsym(h, "run"))(); }'
        )

    return text


def linked(folder: Path, driver: str) -> str:
    """A program that is itself linked against the newer driver."""
    return (
        CALL_NEW
        + PLUGIN.replace("void run(void)", "static void run(void)")
        + 'int main(void) { run(); printf("%d", pointer(6)); }'
    )


def looked_up(folder: Path, driver: str) -> str:
    """A program that asks a handle."""
    return (
        'int main(void) { void *h = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL); use_handle(h);'
        ' int (*f)(int) = dlsym(h, "cuBrandNew");'
        ' printf("%d", f ? f(6) : -1); }'
    )


NEW_CALLERS = {
    "linked": linked,
    "dlsym": looked_up,
    "plugin": from_plugin("RTLD_LOCAL"),
    "plugin bound to itself": from_plugin("RTLD_DEEPBIND"),
}


@PRELOADS
@pytest.mark.parametrize("caller", NEW_CALLERS.values(), ids=NEW_CALLERS)
def test_function_of_a_newer_driver_is_found_behind_the_proxy(
    tmp_path: Path, newer: Stand, caller: Callable[[Path, str], str], preload: str
) -> None:
    """The driver's own answers, while the limit on the known ones holds in the same program."""
    driver = str(null_driver(NEWER) / "libcuda.so.1")
    library = [driver] if caller is linked else []
    program = c(tmp_path / "p", USE + caller(tmp_path, driver), *library)
    assert newer.run(program, LD_PRELOAD=preload) == USED + "7"


def test_check_reports_unknown_functions_when_the_driver_is_newer() -> None:
    """A new version of a limited function is a warning and exit code 1."""
    found = unknown_functions(null_driver(NEWER) / "libcuda.so.1")
    assert found == UnknownFunctions(
        passed_through=("cuBrandNew", "cuNullContext"), unlimited=("cuMemAlloc_v3",)
    )
    assert unknown_functions(null_driver() / "libcuda.so.1") == UnknownFunctions(
        ("cuNullContext",), ()
    )
    assert fenka("proxy", "check", str(null_driver())).exit_code == 0
    newer = fenka("proxy", "check", str(null_driver(NEWER)))
    assert newer.exit_code == 1
    passed = "libcuda.so.1: 2 functions unknown to the proxy, passed through\n  cuBrandNew\n"
    assert passed in newer.stdout
    assert "cuMemAlloc_v3: a newer version of a limited function, NOT LIMITED" in newer.stdout


def test_check_reports_symbol_versions() -> None:
    """A symbol looked up with its version is found behind the proxy, which has no versions."""
    result = fenka("proxy", "check", str(built()))
    assert result.exit_code == 1
    assert "libcuda.so.1: its symbols have versions" in result.stdout


def test_check_exits_with_2_when_a_file_is_no_library(tmp_path: Path) -> None:
    """Text, a truncated file, and a missing one: one sentence each."""
    for content in (b"text", (PROXY / "libcuda.so.1").read_bytes()[:100], b""):
        (tmp_path / "libcuda.so.1").write_bytes(content)
        with pytest.raises(InvalidLibrary, match="is not a shared library"):
            exported_functions(tmp_path / "libcuda.so.1")
        assert fenka("proxy", "check", str(tmp_path)).exit_code == 2
    missing = fenka("proxy", "check", str(tmp_path / "nowhere"))
    assert missing.exit_code == 2
    assert "No such file" in missing.stderr


def test_missing_function_answers_as_a_driver_would(tmp_path: Path, lease: Lease) -> None:
    """The proxy has the name, the driver not: "not found", whether or not it is one that is limited."""
    old = tmp_path / "old"
    old.mkdir()
    c(old / "libcuda.so.1", "int cuInit(unsigned f) { return 0; }", "-shared", "-fPIC", LINKED)
    install(tmp_path / "placed", old)
    stand = Stand(lease, tmp_path / "placed", old)
    lacking = ("cuCtxCreate_v4", "cuMemAlloc_v2", "cuStreamQuery")
    calls = "".join(
        f'printf("%d ", ((int (*)(long, long, long))dlsym(h, "{name}"))(0, 0, 0));'
        for name in lacking
    )
    program = c(
        tmp_path / "p",
        USE + f'int main(void) {{ void *h = dlopen("libcuda.so.1", RTLD_NOW); {calls} }}',
    )
    assert stand.run(program).split() == [str(NOT_FOUND)] * 3


@PRELOADS
def test_dlerror_is_clear_after_a_successful_dlopen(
    tmp_path: Path, null: Stand, preload: str
) -> None:
    """Programs ask dlerror after dlopen and dlsym: what we looked for in vain is not their failure."""
    program = c(
        tmp_path / "p",
        USE
        + 'int main(void) { void *h = dlopen("libcuda.so.1", RTLD_NOW); puts(dlerror() ? "set" : "clear");'
        + ' dlsym(h, "cuInit"); puts(dlerror() ? "set" : "clear"); }',
    )
    assert null.run(program, LD_PRELOAD=preload).split() == ["clear", "clear"]
    behind = {"LD_PRELOAD": preload, "LD_LIBRARY_PATH": str(null.driver)}
    assert null.run(program, **behind).split() == ["clear", "clear"]


ASK = """
import ctypes
print(ctypes.CDLL("libcuda.so.1").cuInit(0), ctypes.CDLL("libnvidia-ml.so.1").nvmlInit_v2())
print(ctypes.CDLL("libcuda.so.1").cuDeviceGetCount(ctypes.byref(ctypes.c_int())))
"""


def test_functions_return_an_error_when_there_is_no_driver(tmp_path: Path, lease: Lease) -> None:
    """One line for each library; every call answers, none crashes."""
    install(tmp_path / "placed", tmp_path / "nothing")
    stand = Stand(lease, tmp_path / "placed", tmp_path / "nothing")
    ran = subprocess.run(
        [sys.executable, "-c", ASK],
        env=stand.environment(),
        capture_output=True,
        text=True,
        check=True,
    )
    assert ran.stdout.split() == [str(NOT_INITIALIZED), str(NVML_LIBRARY_NOT_FOUND), "3"]
    for line, name in zip(ran.stderr.splitlines(), LIBRARIES, strict=True):
        assert line == (
            "fenka: no GPU for this process: its driver is missing: "
            f"neither /run/fenka/driver/{name} can be loaded, nor {tmp_path}/nothing/{name}"
        )
    started = stand.start(0)
    assert started.ask("init").code == NOT_INITIALIZED
    assert "its driver is missing" in started.finish()


def test_proxy_prints_the_reason_when_no_driver_path_is_installed(lease: Lease) -> None:
    """A proxy that nobody has placed looks for a lease's driver, and says where."""
    started = Stand(lease, PROXY, PROXY).start(1, LD_LIBRARY_PATH=f"{PROXY}:{SHIM.parent}")
    assert started.ask("init").code == NOT_INITIALIZED
    assert started.finish() == (
        "fenka: no GPU for this process: its driver is missing: neither /run/fenka/driver/libcuda.so.1"
        " can be loaded, nor is another place written into the proxy\n"
    )


@pytest.mark.parametrize("copied", [False, True], ids=["itself", "a copy"])
def test_proxy_is_refused_as_a_driver(tmp_path: Path, lease: Lease, copied: bool) -> None:
    """Placed in front of itself or of another proxy, it says so instead of going round in circles."""
    placed = tmp_path / "placed"
    install(tmp_path / "other", placed)
    install(placed, tmp_path / "other" if copied else placed)
    started = Stand(lease, placed, placed).start(1)
    assert started.ask("init").code == NOT_INITIALIZED
    assert (
        f"{tmp_path / ('other' if copied else 'placed')}/libcuda.so.1 is a proxy, not the driver"
        in started.finish()
    )


@pytest.mark.parametrize("library", LIBRARIES)
def test_proxy_exports_every_hook(library: str) -> None:
    """Each function that the shim replaces is one of the proxy's names."""
    prefix = "cu" if library == "libcuda.so.1" else "nvml"
    hooks = {name for name in exported_functions(SHIM) if name.startswith(prefix)}
    assert hooks
    assert hooks <= exported_functions(PROXY / library)


@pytest.mark.parametrize("library", LIBRARIES)
def test_proxy_needs_no_newer_glibc(library: str) -> None:
    """It needs libc, the shim and the way behind, and no symbol that is newer than glibc 2.17."""
    said = subprocess.run(
        ["objdump", "-p", "-T", str(PROXY / library)], capture_output=True, text=True, check=True
    ).stdout
    needed = set(re.findall(r"NEEDED\s+(\S+)", said))
    behind = "libfenka-next-cuda.so" if library == "libcuda.so.1" else "libfenka-next-nvml.so"
    assert {"libfenka.so", behind} <= needed
    assert needed <= {
        "libfenka.so", behind, "libc.so.6", "libdl.so.2", "libpthread.so.0", "ld-linux-x86-64.so.2"
    }  # fmt: skip
    versions = {tuple(map(int, v.split("."))) for v in re.findall(r"GLIBC_([\d.]+)", said)}
    assert versions
    assert max(versions) <= (2, 17)
    assert "_chk" not in said


def test_install_replaces_files_when_repeated(tmp_path: Path) -> None:
    """An update changes each file in one step, and leaves nothing else behind."""
    for driver in ("a", "b"):
        assert (
            fenka("proxy", "install", str(tmp_path / "placed"), str(tmp_path / driver)).exit_code
            == 0
        )
    behind = ("libfenka-next-cuda.so", "libfenka-next-nvml.so")
    names = {p.name for p in (tmp_path / "placed").iterdir()}
    assert names == {"libfenka.so", *behind, *LIBRARIES}
    for name, library in zip(behind, LIBRARIES, strict=True):
        written = (tmp_path / "placed" / name).read_bytes()
        assert written.count(os.fsencode(tmp_path / "b" / library) + b"\0") == 2
        assert b"/nowhere/" not in written


def test_install_places_nothing_when_the_path_is_too_long(tmp_path: Path) -> None:
    """It is refused before anything is placed, not truncated."""
    result = fenka("proxy", "install", str(tmp_path / "placed"), "/" + "long/" * 120)
    assert result.exit_code == 2
    assert "is longer than 511 bytes" in result.stderr
    assert list((tmp_path / "placed").iterdir()) == []
