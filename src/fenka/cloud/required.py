"""Checks what one provider alone requires of a configuration, without its library and without a cloud."""

from fenka.cloud import simulated
from fenka.cloud.alibaba import settings as alibaba
from fenka.cloud.aws import settings as aws
from fenka.cloud.config import Config
from fenka.cloud.karpenter import provider as karpenter

CHECKS = {
    "ess": alibaba.check_settings,
    "aws": aws.check_settings,
    "karpenter": karpenter.check_settings,
    "simulated": simulated.check_settings,
}
"""By `provider.kind`."""


def check_required(config: Config) -> None:
    """Raise InvalidConfig for the first setting that the provider misses."""
    CHECKS[config.provider.kind](config)
