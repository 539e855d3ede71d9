"""Settings of all tests."""

import inspect
import os
import signal

import pytest
from hypothesis import HealthCheck, settings

from tests.coroutines import synchronous
from tests.tiers import Tiers

# gRPC would start threads of its own in every child that a test forks. One such child was ended by SIGBUS
# before its exec.
os.environ["GRPC_ENABLE_FORK_SUPPORT"] = "0"

# Hypothesis must not judge how fast a machine is.

settings.register_profile(
    "fenka", deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True
)
settings.load_profile("fenka")


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> None:
    """Make a test that is a coroutine function synchronous, also one that Hypothesis calls."""
    test = pyfuncitem.obj
    if inspect.iscoroutinefunction(test):
        pyfuncitem.obj = synchronous(test)
    hypothesis = getattr(test, "hypothesis", None)
    if hypothesis is not None and inspect.iscoroutinefunction(hypothesis.inner_test):
        hypothesis.inner_test = synchronous(hypothesis.inner_test)


def pytest_configure(config: pytest.Config) -> None:
    """Let fixtures end their processes when the run is ended, also by SIGTERM.

    Shells let background jobs ignore SIGINT, and programs would inherit that.
    """
    config.pluginmanager.register(Tiers())
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)
