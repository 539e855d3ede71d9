"""Marks the tests that start processes, or take seconds: `make test-fast` runs the others."""

import ast
import functools
import sys
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest
from hypothesis import settings

TESTS = Path(__file__).parent

FAST = "not process and not slow"
"""The option -m of `make test-fast`."""

EXAMPLES = 10
"""Of each property, in `make test-fast`. `make test` tries as many as the property says."""

STARTERS = {
    "_hardware",
    "EnvoyProcess",
    "GatewayOptions",
    "create_subprocess_exec",
    "fork",
    "multiprocessing",
    "playwright",
    "posix_spawn",
    "SimulatedNode",
    "subprocess",
}
"""Names of modules, functions and classes that start processes."""

SLOW = {"alibabacloud_credentials", "alibabacloud_ecs20140526", "boto3", "botocore"}
"""Names of modules whose import takes seconds, or whose simulations do."""

_EVENTS = {"os.fork", "os.forkpty", "os.posix_spawn", "os.system", "subprocess.Popen"}
"""Audit events of Python."""


class Tiers:
    """A plugin of pytest. `make test-fast` runs the tests without the markers `process` and `slow`."""

    def __init__(self) -> None:
        self._unmarked = False
        self._started: list[str] = []
        sys.addaudithook(self._hear)

    def pytest_ignore_collect(self, collection_path: Path, config: pytest.Config) -> bool | None:
        """Leave out modules whose tests would all be deselected: importing them takes most of the time."""
        if config.option.markexpr != FAST:
            return None
        if collection_path.is_dir():
            return True if is_slow(collection_path / "conftest.py") else None
        module = collection_path.suffix == ".py"
        return (
            True
            if module and (starts_processes(collection_path) or is_slow(collection_path))
            else None
        )

    def pytest_itemcollected(self, item: pytest.Item) -> None:
        """Mark a test if its module, or that of one of its fixtures, starts processes or is slow."""
        if any(map(starts_processes, {item.path, *_fixture_modules(item)})):
            item.add_marker("process")
        elif is_slow(item.path):
            item.add_marker("slow")
        elif item.config.option.markexpr == FAST:
            _try_fewer_examples(item)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        """Begin to watch a test without the marker. Other runs may start processes anywhere."""
        self._started.clear()
        fast = item.config.option.markexpr == FAST
        self._unmarked = fast and item.get_closest_marker("process") is None

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_teardown(self) -> Generator[None]:
        """Fail the test if it has started a process."""
        yield
        self._unmarked = False
        if self._started:
            pytest.fail(
                f"starts processes without the marker `process` ({', '.join(self._started)}): "
                "mark it, or add the name of what starts them to STARTERS in tests/tiers.py"
            )

    def _hear(self, event: str, arguments: tuple[object, ...]) -> None:
        if self._unmarked and event in _EVENTS:
            self._started.append(" ".join(map(str, (event, *arguments[:1]))))


def starts_processes(module: Path) -> bool:
    """Return whether a module of the tests, or a helper that it imports, names one of STARTERS."""
    return not STARTERS.isdisjoint(_all_names(module))


def is_slow(module: Path) -> bool:
    """Return whether a module of the tests, or a helper that it imports, names one of SLOW."""
    return not SLOW.isdisjoint(_all_names(module))


@functools.cache
def _all_names(module: Path) -> frozenset[str]:
    """Return the names that a module of the tests and its helpers use; none of another or absent module."""
    if not module.is_relative_to(TESTS) or not module.is_file():
        return frozenset()
    tree = ast.parse(module.read_text())
    return frozenset(_names(tree)).union(*map(_all_names, _helpers(tree)))


def _try_fewer_examples(item: pytest.Item) -> None:
    """Limit a test of Hypothesis to EXAMPLES."""
    test = getattr(item, "obj", None)
    for owner, name in (
        (getattr(test, "__func__", test), "_hypothesis_internal_use_settings"),
        (getattr(item, "cls", None), "settings"),
    ):
        given = getattr(owner, name, None)
        if isinstance(given, settings) and given.max_examples > EXAMPLES:
            setattr(owner, name, settings(given, max_examples=EXAMPLES))


def _fixture_modules(item: pytest.Item) -> Iterator[Path]:
    fixtures = getattr(item, "_fixtureinfo", None)
    for definitions in fixtures.name2fixturedefs.values() if fixtures else ():
        for definition in definitions:
            yield Path(definition.func.__code__.co_filename)


def _names(tree: ast.Module) -> set[str]:
    """Return all names that a module uses, and the parts of those that it imports."""
    names = set[str]()
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=name) | ast.Attribute(attr=name) | ast.alias(name=name):
                names.add(name)
            case ast.ImportFrom(module=str(name)):
                names.update(name.split("."))
    return names


def _helpers(tree: ast.Module) -> set[Path]:
    """Return the modules of the tests that a module imports."""
    names = {
        name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("tests")
        for name in (node.module, *(f"{node.module}.{alias.name}" for alias in node.names))
    }
    files = {TESTS.parent / f"{name.replace('.', '/')}.py" for name in names}
    return {file for file in files if file.is_file()}
