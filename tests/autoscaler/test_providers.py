"""Tests how the provider of a configuration is selected."""

import sys

import pytest
from msgspec.structs import replace

from fenka.autoscaler.providers import ProviderMissing, open_provider
from fenka.cloud.config import ProviderConfig
from tests.autoscaler.snapshots import config
from tests.coroutines import synchronous
from tests.fakes.api_server import FakeApiServer


@pytest.mark.parametrize(
    ("kind", "library", "sentence"),
    [
        (
            "aws",
            "boto3",
            "provider.kind is aws, but boto3 is not installed: `",
        ),
    ],
)
@synchronous
async def test_provider_says_what_to_install_when_its_library_is_missing(
    monkeypatch: pytest.MonkeyPatch, kind: str, library: str, sentence: str
) -> None:
    """The extras are large, so few installations have all of them."""
    for name in [name for name in sys.modules if name.startswith(("fenka.cloud.aws", library))]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, library, None)
    settings = replace(config(), provider=ProviderConfig(kind="aws"))
    async with FakeApiServer().api() as api:
        with pytest.raises(ProviderMissing) as caught:
            open_provider(settings, api)
    assert str(caught.value).startswith(sentence)
