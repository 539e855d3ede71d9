"""How fenka starts Python: modules of the current directory, which may be another user's, never run."""

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import fenka
from fenka.jobs import notebook

pytestmark = pytest.mark.process  # Jupyter hashes a password

SOURCES = Path(fenka.__file__).parent

USERS_OWN_DIRECTORY = {"cli/demo.py"}
"""These start the user's own programs, whose current directory is the user's."""

_ISOLATED = re.compile(r"-[A-Za-z]*[PI]")
_STARTS = ("Popen", "run", "check_output", "check_call", "call", "create_subprocess_exec")


def _interpreter_starts(tree: ast.AST) -> Iterator[list[ast.expr]]:
    """Yield the words of every command line that begins with an interpreter."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func).startswith("os.exec"):
            continue  # Its second argument is the command line.
        words = {ast.Call: "args", ast.List: "elts", ast.Tuple: "elts"}.get(type(node))
        line: list[ast.expr] = getattr(node, words) if words else []
        for number, word in enumerate(line[:-1]):
            if ast.unparse(word) in ("sys.executable", "python"):
                yield line[number:]


def _functions(path: Path) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def _process_starts(function: ast.AST) -> Iterator[ast.Call]:
    for node in ast.walk(function):
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and (node.func.attr in _STARTS and "subprocess" in ast.unparse(node.func))
        ):
            yield node


def _faults(path: Path) -> Iterator[str]:
    name = str(path.relative_to(SOURCES))
    for function in _functions(path):
        starts = [*_interpreter_starts(function)]
        for words in starts:
            option = words[1].value if isinstance(words[1], ast.Constant) else ""
            safe = isinstance(option, str) and _ISOLATED.match(option)
            if not safe and "PYTHONSAFEPATH" not in ast.unparse(function):
                yield f"{name}: {function.name}: neither -P nor -I"
        for call in _process_starts(function) if starts else ():
            directory = {word.arg: ast.unparse(word.value) for word in call.keywords}.get("cwd")
            if directory != "'/'" and name not in USERS_OWN_DIRECTORY:
                yield f"{name}: {function.name}: cwd is not /"
        text = ast.unparse(function) if starts else ""
        if "os.exec" in text and "os.chdir('/')" not in text:
            yield f"{name}: {function.name}: the current directory is not /"


def test_interpreters_are_isolated_wherever_they_are_started() -> None:
    """A start without -P or -I finds modules in the current directory first."""
    files = [path for path in SOURCES.rglob("*.py") if "sys.executable" in path.read_text()]
    assert len(files) > 8
    assert [fault for path in files for fault in _faults(path)] == []


def test_scripts_start_isolated_interpreters() -> None:
    """Scripts and commands of pods, too, which have Pythons of any version."""
    starts = [
        line
        for path in SOURCES.rglob("*")
        if path.suffix in (".py", ".sh")
        for line in path.read_text().splitlines()
        if re.search(r'(exec|if) "\$python"', line)
    ]
    assert len(starts) >= 3
    assert [line for line in starts if not re.search(r'(exec|if) "\$python" -I', line)] == []


@pytest.mark.parametrize(
    "line",
    ['run([sys.executable, "-m", "x"])', 'run([python, "-c", code])', "p(sys.executable, x)"],
)
def test_unisolated_start_is_found(line: str) -> None:
    """The search knows the forms in which a start is written."""
    (words,) = _interpreter_starts(ast.parse(line))
    assert not (isinstance(words[1], ast.Constant) and _ISOLATED.match(str(words[1].value)))


@pytest.fixture
def hostile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current directory is another user's, with modules that Python and Jupyter have, too."""
    for module in ("jupyter_server", "logging"):
        (tmp_path / module).mkdir()
        (tmp_path / module / "__init__.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    (tmp_path / "jupyter_server" / "auth.py").write_text("passwd = lambda password: password\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("path", ["", ":"])
def test_password_is_hashed_by_jupyter_when_the_directory_has_modules_of_its_name(
    hostile: Path, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    """Neither the current directory nor an empty entry of PYTHONPATH is searched."""
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent), prepend=":")
    monkeypatch.setenv("PYTHONPATH", path)
    assert notebook.hash_password("secret").startswith("argon2:")
    assert not (hostile / "ran").exists()


def test_empty_hash_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Jupyter would take an empty hash for a server without a password."""
    for name, script in (("jupyter-lab", "#!/bin/sh\n"), ("python", "#!/bin/sh\nexit 0\n")):
        (tmp_path / name).write_text(script)
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(notebook.NoJupyter, match="cannot hash the password"):
        notebook.hash_password("secret")
