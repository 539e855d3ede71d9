"""Loads the parts of kubernetes-asyncio that read kubeconfigs and service accounts and connect.

Its package would import a class for every kind of Kubernetes object, which takes over a second of each
command. So its two packages are entered here without their `__init__`, and its version is bounded.
"""

import contextlib
import importlib.util
import ssl
import sys
from collections.abc import Iterator
from importlib import import_module
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any


def _without_init(name: str, folder: Path) -> ModuleType:
    module = sys.modules.get(name)
    if module is None:
        module = ModuleType(name)
        module.__path__ = [str(folder)]
        module.__spec__ = ModuleSpec(name, None, is_package=True)
        sys.modules[name] = module
    return module


class _Deferred(ModuleType):
    """A module that is imported when one of its attributes is used."""

    def __getattr__(self, name: str) -> Any:
        return getattr(import_module(self.__name__), name)


@contextlib.contextmanager
def without_default_certificates() -> Iterator[None]:
    """Import aiohttp without loading the default certificates twice, which takes 0.04 s of each command.

    They are for connections without a TLS context of their own, and fenka makes none.
    """
    ssl.SSLContext.set_default_verify_paths = lambda _: None  # type: ignore[assignment]
    try:
        yield
    finally:
        del ssl.SSLContext.set_default_verify_paths


def load() -> SimpleNamespace:
    """Return the classes and functions that `Api` uses, as attributes by their own names."""
    if "kubernetes_asyncio" not in sys.modules:
        spec = importlib.util.find_spec("kubernetes_asyncio")
        if spec is None or spec.origin is None:
            raise ModuleNotFoundError(
                "kubernetes_asyncio is not installed", name="kubernetes_asyncio"
            )
        folder = Path(spec.origin).parent
        _without_init("kubernetes_asyncio", folder)
        client: Any = _without_init("kubernetes_asyncio.client", folder / "client")
        # Only basic authentication uses it.
        deferred = sys.modules.setdefault("urllib3", _Deferred("urllib3"))
        client.Configuration = import_module(
            "kubernetes_asyncio.client.configuration"
        ).Configuration
        if isinstance(deferred, _Deferred):
            del sys.modules["urllib3"]
        client.ApiClient = object  # named there, needed only by what fenka does not use
    incluster = import_module("kubernetes_asyncio.config.incluster_config")
    kubeconfig = import_module("kubernetes_asyncio.config.kube_config")
    return SimpleNamespace(
        Configuration=import_module("kubernetes_asyncio.client.configuration").Configuration,
        RESTClientObject=import_module("kubernetes_asyncio.client.rest").RESTClientObject,
        ConfigException=import_module("kubernetes_asyncio.config.config_exception").ConfigException,
        load_incluster_config=incluster.load_incluster_config,
        load_kube_config=kubeconfig.load_kube_config,
    )
