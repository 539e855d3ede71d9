"""The configurations in the documentation's pages about providers are accepted by these."""

from pathlib import Path
from typing import Any, cast

from fenka.cloud.aws.group_settings import AwsConfig
from fenka.cloud.aws.provider import AwsProvider
from fenka.cloud.config import AutoscalerConfig
from fenka.cloud.config_file import decode_config
from fenka.cloud.karpenter import KarpenterConfig, KarpenterProvider

PAGES = Path(__file__).parents[2] / "docs" / "do"


def documented(page: str) -> AutoscalerConfig:
    """Return the first configuration of a page."""
    text = (PAGES / page).read_text()
    return decode_config(text.partition("```yaml\n")[2].partition("```")[0].encode())


def test_configuration_of_aws_is_accepted() -> None:
    """A group with `id`, and one without."""
    config = documented("autoscale-aws.md")
    assert isinstance(config, AwsConfig)
    assert [group.id for group in config.groups] == ["asg-t4-spot", ""]
    AwsProvider(config, cast("Any", None), lambda: 0.0)


def test_configuration_of_karpenter_is_accepted() -> None:
    """With its node class."""
    config = documented("autoscale-karpenter.md")
    assert isinstance(config, KarpenterConfig)
    assert config.groups[0].node_class is not None
    assert config.groups[0].node_class.kind == "EC2NodeClass"
    KarpenterProvider(config, cast("Any", None))
