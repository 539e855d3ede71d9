"""Selects the provider of a configuration. A provider's library is loaded only if it is used."""

import importlib
from contextlib import AbstractAsyncContextManager

from fenka.autoscaler.node_claims import ApiNodeClaims
from fenka.cloud.config import Config
from fenka.cloud.port import Provider
from fenka.core.errors import INVALID_INPUT, FenkaError
from fenka.kubernetes.client import Api

MODULES = {
    "simulated": ("fenka.cloud.simulated", ""),
    "ess": ("fenka.cloud.alibaba.provider", "alibaba"),
    "aws": ("fenka.cloud.aws.provider", "aws"),
    "karpenter": ("fenka.cloud.karpenter.provider", ""),
}
"""The module that has `open_provider`, and the extra with its library, by `provider.kind`."""


class ProviderMissing(FenkaError):
    """The provider cannot be loaded; the message says what to install."""

    exit_code = INVALID_INPUT


def open_provider(config: Config, api: Api) -> AbstractAsyncContextManager[Provider]:
    """Return the provider of a configuration. Raises ProviderMissing.

    api: the API server, where a provider's objects are in the cluster.
    """
    kind = config.provider.kind
    module, extra = MODULES[kind]
    try:
        loaded = importlib.import_module(module)
    except ModuleNotFoundError as why:
        if not extra:
            raise
        raise ProviderMissing(
            f"provider.kind is {kind}, but {why.name} is not installed: install fenka[{extra}]"
        ) from None
    objects = (ApiNodeClaims(api),) if kind == "karpenter" else ()
    provider: AbstractAsyncContextManager[Provider] = loaded.open_provider(config, *objects)
    return provider
