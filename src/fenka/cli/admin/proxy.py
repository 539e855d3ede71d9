"""`fenka proxy`: libraries under the driver's names that hold the limits (docs/understand/proxy.md)."""

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from fenka.cli.common_options import group, register
from fenka.cli.error_report import UserError
from fenka.core.errors import INVALID_INPUT, FenkaError
from fenka.isolation import proxy_install
from fenka.isolation.proxy_install import has_symbol_versions

app = group("Install and check libraries in front of the driver.")

DriverArgument = Annotated[Path, typer.Argument(help="directory of the driver's own libraries")]


def install(
    directory: Annotated[Path, typer.Argument(help="where programs shall find the driver")],
    driver: DriverArgument,
) -> None:
    """Put the proxy in front of a driver."""
    with _exit_code_of_failures():
        proxy_install.install(directory, driver)


def check(driver: DriverArgument) -> None:
    """Print what the driver exports and the proxy does not; exit code 1 if a limit can be bypassed."""
    unlimited = False
    with _exit_code_of_failures():
        for name in proxy_install.LIBRARIES:
            unknown = proxy_install.unknown_functions(driver / name)
            print(
                f"{name}: {len(unknown.passed_through)} functions unknown to the proxy, passed through"
            )
            for function in unknown.passed_through:
                print(f"  {function}")
            if has_symbol_versions(driver / name):
                unlimited = True
                print(f"{name}: its symbols have versions: dlvsym bypasses the proxy, NOT LIMITED")
            for function in unknown.unlimited:
                unlimited = True
                print(f"  {function}: a newer version of a limited function, NOT LIMITED by name")
    if unlimited:
        sys.exit(1)


@contextlib.contextmanager
def _exit_code_of_failures() -> Iterator[None]:
    """Exit with 2 for files that cannot be used: 1 means that a limit can be bypassed."""
    try:
        yield
    except (OSError, ValueError, FenkaError) as why:
        raise UserError(str(why), INVALID_INPUT) from None


register(app, install, "Put the proxy in front of a driver.")
register(app, check, "Report functions of a driver that the proxy does not know.")
