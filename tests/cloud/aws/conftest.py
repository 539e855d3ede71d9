"""AWS for tests: one proxy and one moto for all of them."""

from collections.abc import Iterator

import pytest

from fenka.cloud.aws.boto import Calls
from tests.cloud.aws.cloud import AwsCloud
from tests.cloud.aws.fake import Aws
from tests.cloud.aws.proxy import REGION


@pytest.fixture(scope="session")
def server() -> Iterator[Aws]:
    """Both servers; they take seconds to start."""
    fake = Aws()
    yield fake
    fake.close()


@pytest.fixture(scope="session")
def calls(server: Aws) -> Iterator[Calls]:
    """boto3's clients, which are slow to make, with credentials from the environment."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ACCESS_KEY_ID", "test")
        patch.setenv("AWS_SECRET_ACCESS_KEY", "test")
        clients = Calls(REGION, server.url)
    yield clients
    clients.close()


@pytest.fixture
def aws(server: Aws) -> Aws:
    """AWS without instances."""
    server.reset()
    return server


@pytest.fixture(params=["groups", "fleets"])
def cloud(aws: Aws, calls: Calls, request: pytest.FixtureRequest) -> AwsCloud:
    """The offers of the contract, in both ways."""
    return AwsCloud(aws, calls, request.param == "groups")


@pytest.fixture
def grouped(aws: Aws, calls: Calls) -> AwsCloud:
    """The offers of the contract in Auto Scaling groups."""
    return AwsCloud(aws, calls, grouped=True)


@pytest.fixture
def fleets(aws: Aws, calls: Calls) -> AwsCloud:
    """The offers of the contract without Auto Scaling groups."""
    return AwsCloud(aws, calls, grouped=False)
