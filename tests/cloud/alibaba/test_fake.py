"""The fake itself: it refuses what the cloud refuses, and starts and ends machines."""

import asyncio
import hashlib
import json
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from alibabacloud_ecs20140526 import models as ecs
from alibabacloud_ess20220222 import models as ess
from alibabacloud_tea_openapi.exceptions import AlibabaCloudException
from alibabacloud_tea_openapi.utils import Utils

from fenka.cloud.port import Order
from tests.cloud.alibaba.cloud import Cloud, second
from tests.cloud.alibaba.harness import REGION, START, AlibabaCloud, landscape
from tests.cloud.alibaba.protocol import Call, CloudError, check_signature, read_parameters
from tests.cloud.alibaba.state import Folder, InstanceType
from tests.cloud.contract import ON_DEMAND, SPOT, SPOT_CAP
from tests.waiting import until

RUN = {
    "region_id": REGION,
    "launch_template_id": "lt-1",
    "instance_type": "gn6i",
    "zone_id": "g",
    "v_switch_id": "vsw-g",
}


async def code_of(call: Any) -> str:
    """Return the code of the error that a call of the SDK ends with, empty if it succeeds."""
    try:
        await call
    except AlibabaCloudException as why:
        return str(why.code)
    return ""


# ---- signatures and parameters ----


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({}, ""),
        ({"query": {"A": "changed"}}, "SignatureDoesNotMatch"),
        ({"method": "GET"}, "SignatureDoesNotMatch"),
        ({"path": "/x"}, "SignatureDoesNotMatch"),
        ({"body": b"x"}, "InvalidContentSha256"),
        ({"x-acs-action": "Other"}, "SignatureDoesNotMatch"),
        ({"x-acs-signature-nonce": "other"}, "SignatureDoesNotMatch"),
        ({"authorization": ""}, "IncompleteSignature"),
        ({"authorization": "SignedHeaders=host"}, "IncompleteSignature"),
    ],
)
def test_signature_covers_the_whole_call(change: dict[str, Any], code: str) -> None:
    """A call as the SDK signs it, and changes of it."""
    call = signed_call()
    fields: dict[str, Any] = {name: getattr(call, name) for name in Call.__slots__}
    for name, value in change.items():
        if name in fields:
            fields[name] = value
        else:
            fields["headers"] = {**call.headers, name: value}
    assert refusal(Call(**fields), {"key": "secret"}, START) == code


@pytest.mark.parametrize(
    ("secrets", "late", "code"),
    [
        ({"key": "secret"}, 899, ""),
        ({"key": "secret"}, 901, "InvalidTimeStamp.Expired"),
        ({"key": "other"}, 0, "SignatureDoesNotMatch"),
        ({"other": "secret"}, 0, "InvalidAccessKeyId.NotFound"),
    ],
)
def test_signature_is_checked_against_key_and_time(
    secrets: dict[str, str], late: float, code: str
) -> None:
    """A quarter of an hour is allowed for clocks."""
    assert refusal(signed_call(), secrets, START + late) == code


def test_signature_must_cover_the_action() -> None:
    """A signature of the host alone could be used for anything."""
    call = signed_call()
    text = call.headers["authorization"]
    start, end = text.index("SignedHeaders="), text.index(",Signature=")
    headers = {**call.headers, "authorization": f"{text[:start]}SignedHeaders=host{text[end:]}"}
    changed = Call(call.method, call.path, call.query, headers, call.body)
    assert refusal(changed, {"key": "secret"}, START) == "IncompleteSignature"


def signed_call() -> Call:
    """Return a call with the SDK's own signature."""
    body_hash = hashlib.sha256(b"").hexdigest()
    headers = {
        "host": "127.0.0.1:1",
        "accept": "application/json",
        "x-acs-action": "DescribeInstances",
        "x-acs-version": "2014-05-26",
        "x-acs-date": second(START),
        "x-acs-signature-nonce": "1",
        "x-acs-content-sha256": body_hash,
    }
    query = {"RegionId": REGION, "A": "a b~*/ä"}
    request = SimpleNamespace(method="POST", pathname="/", query=query, headers=headers)
    text = Utils.get_authorization(request, "ACS3-HMAC-SHA256", body_hash, "key", "secret")
    return Call("POST", "/", query, {**headers, "authorization": text}, b"")


def refusal(call: Call, secrets: dict[str, str], now: float) -> str:
    """Return the code of a refused signature, empty if it is accepted."""
    try:
        check_signature(call, secrets, now)
    except CloudError as why:
        return why.code
    return ""


@pytest.mark.parametrize(
    ("model", "query", "expected"),
    [
        (ecs.RunInstancesRequest, {"RegionId": "r", "Amount": "2"}, {"RegionId": "r", "Amount": 2}),
        (ecs.RunInstancesRequest, {"Amount": "2"}, "MissingRegionId"),
        (ecs.RunInstancesRequest, {"RegionId": "r", "Amount": "two"}, "InvalidAmount"),
        (ecs.RunInstancesRequest, {"RegionId": "r", "Colour": "red"}, "InvalidParameter"),
        (ecs.RunInstancesRequest, {"RegionId": "r", "DryRun": "maybe"}, "InvalidDryRun"),
        (
            ecs.RunInstancesRequest,
            {"RegionId": "r", "Tag.1.Key": "k", "Tag.1.Value": "v", "SpotPriceLimit": "1.5"},
            {"RegionId": "r", "Tag": [{"Key": "k", "Value": "v"}], "SpotPriceLimit": 1.5},
        ),
        (ecs.RunInstancesRequest, {"RegionId": "r", "Tag.2.Key": "k"}, "InvalidTag"),
        (ecs.RunInstancesRequest, {"RegionId": "r", "Tag.1.Keys": "k"}, "InvalidParameter"),
        (
            ess.RemoveInstancesRequest,
            {"ScalingGroupId": "g", "InstanceIds.1": "i", "DecreaseDesiredCapacity": "True"},
            {"ScalingGroupId": "g", "InstanceIds": ["i"], "DecreaseDesiredCapacity": True},
        ),
        (ess.RemoveInstancesRequest, {"ScalingGroupId": "g"}, "MissingInstanceIds"),
        (ess.ScaleWithAdjustmentShrinkRequest, {"ScalingGroupId": "g"}, "MissingAdjustmentType"),
    ],
)
def test_parameters_are_those_of_the_sdk(
    model: type, query: dict[str, str], expected: dict[str, Any] | str
) -> None:
    """With their types; unknown ones and missing ones are refused."""
    if isinstance(expected, dict):
        assert read_parameters(model, query) == expected
    else:
        with pytest.raises(CloudError) as why:
            read_parameters(model, query)
        assert why.value.code == expected


# ---- launches ----


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({}, ""),
        ({"region_id": "us-east-1"}, "InvalidRegionId.NotFound"),
        ({"launch_template_id": "lt-2"}, "InvalidLaunchTemplate.NotFound"),
        ({"launch_template_id": None}, "MissingParameter"),
        ({"v_switch_id": "vsw-h"}, "InvalidParameter.Mismatch"),
        ({"instance_type": "gn7"}, "Zone.NotOnSale"),
        ({"amount": 101}, "InvalidMaxAmount.Malformed"),
        ({"amount": 2, "min_amount": 3}, "InvalidMinAmount.Malformed"),
        ({"spot_strategy": "Cheap"}, "InvalidSpotStrategy"),
        ({"spot_strategy": "SpotWithPriceLimit"}, "InvalidSpotPriceLimit"),
        ({"spot_price_limit": 4.0}, "InvalidSpotPriceLimit"),
        (
            {"spot_strategy": "SpotWithPriceLimit", "spot_price_limit": 4.0001},
            "InvalidSpotPriceLimit",
        ),
        (
            {"spot_strategy": "SpotWithPriceLimit", "spot_price_limit": 3.0},
            "InvalidSpotPriceLimit.LowerThanPublicPrice",
        ),
        ({"dry_run": True}, "DryRunOperation"),
        ({"client_token": "x" * 65}, "InvalidClientToken.ValueNotSupported"),
        ({"image_id": "m-1"}, "FakeNotImplemented"),
    ],
)
async def test_launch_is_refused_as_the_cloud_refuses_it(
    cloud: AlibabaCloud, fields: dict[str, Any], code: str
) -> None:
    """Nothing comes then."""
    _, client = cloud.clients()
    assert (
        await code_of(client.run_instances_async(ecs.RunInstancesRequest(**RUN | fields))) == code
    )
    assert len(cloud.state.cloud.machines) == (0 if code else 1)


@pytest.mark.parametrize(
    ("amount", "least", "came"), [(3, None, 0), (3, 3, 0), (3, 2, 2), (3, 1, 2), (2, None, 2)]
)
async def test_launch_is_all_or_nothing_without_min_amount(
    cloud: AlibabaCloud, amount: int, least: int | None, came: int
) -> None:
    """Stock for two."""
    cloud.stock(ON_DEMAND, 2)
    _, client = cloud.clients()
    request = ecs.RunInstancesRequest(**RUN, amount=amount, min_amount=least)
    code = await code_of(client.run_instances_async(request))
    assert code == ("" if came else "OperationDenied.NoStock")
    assert len(cloud.state.cloud.machines) == came


async def test_token_repeats_its_answer_also_if_that_was_a_refusal(cloud: AlibabaCloud) -> None:
    """With other parameters it is refused. A throttled call spends no token."""
    _, client = cloud.clients()

    async def launch(token: str, **fields: Any) -> str:
        request = ecs.RunInstancesRequest(**RUN, client_token=token, **fields)
        return await code_of(client.run_instances_async(request))

    cloud.stock(ON_DEMAND, 0)
    assert await launch("a") == "OperationDenied.NoStock"
    cloud.stock(ON_DEMAND, 5)
    assert await launch("a") == "OperationDenied.NoStock"
    cloud.fail("launch", "throttle")
    assert await launch("b") == "Throttling.User"
    assert await launch("b") == ""
    assert await launch("b") == ""
    assert await launch("b", amount=2) == "IdempotentParameterMismatch"
    assert len(cloud.state.cloud.machines) == 1


async def test_quota_of_the_account_refuses_launches(cloud: AlibabaCloud) -> None:
    """All offers together."""
    cloud.change(quota=1)
    _, client = cloud.clients()
    assert await code_of(client.run_instances_async(ecs.RunInstancesRequest(**RUN))) == ""
    code = await code_of(client.run_instances_async(ecs.RunInstancesRequest(**RUN)))
    assert code == "QuotaExceed.ElasticQuota"


# ---- other actions ----


async def test_spot_advice_and_types_are_listed(cloud: AlibabaCloud) -> None:
    """As the SDK reads them."""
    cloud.change(types={"gn6i": InstanceType(4, 15.0, 1, "NVIDIA T4")})
    _, client = cloud.clients()
    advice = await client.describe_spot_advice_async(
        ecs.DescribeSpotAdviceRequest(region_id=REGION)
    )
    (zone,) = advice.body.available_spot_zones.available_spot_zone
    (resource,) = zone.available_spot_resources.available_spot_resource
    assert (zone.zone_id, resource.instance_type, resource.average_spot_discount) == (
        "g",
        "gn6i",
        3,
    )
    types = await client.describe_instance_types_async(
        ecs.DescribeInstanceTypesRequest(instance_types=["gn6i"])
    )
    (kind,) = types.body.instance_types.instance_type
    assert (kind.cpu_core_count, kind.gpuamount, kind.gpuspec) == (4, 1, "NVIDIA T4")


async def test_price_history_is_paged_and_has_changes(cloud: AlibabaCloud) -> None:
    """The price three hours ago, and each one since."""
    cloud.change(page=2)
    for price in (4.0, 5.0, 6.0):
        cloud.wait(60)
        cloud.price(SPOT, price)
    offers = {it.key: it.price for it in await cloud.provider.offers()}
    assert offers == {SPOT: 6.0, ON_DEMAND: 11.63}
    assert cloud.state.calls.count("DescribeSpotPriceHistory") == 4


async def test_unknown_action_is_refused(cloud: AlibabaCloud) -> None:
    """It is the SDK's, but not the fake's."""
    client, _ = cloud.clients()
    request = ess.DescribeScalingRulesRequest(region_id=REGION)
    assert await code_of(client.describe_scaling_rules_async(request)) == "InvalidAction.NotFound"


# ---- the program ----


async def test_metadata_tells_when_an_instance_is_taken_back(cloud: AlibabaCloud) -> None:
    """With a token only; 404 as long as it is not."""
    (name,) = await cloud.provider.launch(Order("a-1", SPOT, 1, cap=SPOT_CAP))
    base = f"http://{cloud.address}/metadata/{name}/latest"
    url = f"{base}/meta-data/instance/spot/termination-time"

    def ask(url: str, method: str, headers: dict[str, str]) -> str:
        request = urllib.request.Request(url, method=method, headers=headers)
        try:
            with urllib.request.urlopen(request) as answer:
                return str(answer.read().decode())
        except urllib.error.HTTPError as why:
            return str(why.code)

    ttl = {"X-aliyun-ecs-metadata-token-ttl-seconds": "60"}
    token = await asyncio.to_thread(ask, f"{base}/api/token", "PUT", ttl)
    headers = {"X-aliyun-ecs-metadata-token": token}
    assert await asyncio.to_thread(ask, url, "GET", {}) == "403"
    assert await asyncio.to_thread(ask, url, "GET", headers) == "404"
    cloud.price(SPOT, SPOT_CAP + 1)
    cloud.wait(3600)
    assert await asyncio.to_thread(ask, url, "GET", headers) == second(START + 3900)


@pytest.fixture
def program(tmp_path: Path) -> Iterator[tuple[AlibabaCloud, Path]]:
    """The fake as a program with a real clock. Its command writes a log and fails while `fails` exists."""
    folder, log = Folder(tmp_path / "cloud"), tmp_path / "log"
    folder.change(landscape())
    script = f'test -e {tmp_path}/fails && exit 1; echo "$@" >> {log}'
    command = [sys.executable, "-m", "tests.cloud.alibaba.server", str(folder.path)]
    command += ["--command", "sh", "-c", script, "command"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        cloud = AlibabaCloud(folder)
        (folder.path / "clock").unlink()
        (folder.path / "state.json").unlink()
        cloud.address = process.stdout.readline().strip()
        cloud.provider = cloud.open({})
        yield cloud, log
        process.send_signal(signal.SIGTERM)


async def test_program_starts_and_ends_machines(
    program: tuple[AlibabaCloud, Path], tmp_path: Path
) -> None:
    """A start that fails is tried again."""
    cloud, log = program
    (tmp_path / "fails").touch()
    (name,) = await cloud.provider.launch(Order("a-1", ON_DEMAND, 1))
    (tmp_path / "fails").unlink()
    await until(lambda: log.exists() and log.read_text() == f"start {name} t4 gn6i g\n")
    await cloud.provider.end([name])
    await until(lambda: log.read_text() == f"start {name} t4 gn6i g\nend {name}\n")


def test_state_outlives_the_program(tmp_path: Path) -> None:
    """It is a file, as real clouds outlive who uses them."""
    folder = Folder(tmp_path)
    folder.change(landscape())
    first = Cloud(folder, START)
    first.state.calls.append("Something")
    first.keep()
    assert Cloud(folder, START + 1).state.calls == ["Something"]
    assert json.loads((tmp_path / "state.json").read_text())["cloud"]["began_at"] == START
