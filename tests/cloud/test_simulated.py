"""The simulated provider: the port's contract, and what is its own."""

import json
from pathlib import Path

import msgspec
import pytest

from fenka.cloud.port import Denied, InstanceState, OfferKey, Order, OutOfStock, Quota, Throttled
from fenka.cloud.simulated_cloud import (
    Fault,
    Prices,
    Scenario,
    SimulatedOffer,
    SimulatedProvider,
    read_scenario,
)
from tests.cloud.contract import (
    ON_DEMAND,
    SPOT,
    SPOT_CAP,
    Cloud,
    ProtectedSpotContract,
    ProviderContract,
)


def offer(key: OfferKey, *market: Prices, startup_s: float = 0.0) -> SimulatedOffer:
    """Return an offer over time."""
    return SimulatedOffer(key.group, key.type, key.zone, market, key.capacity, startup_s)


class SimulatedCloud(Cloud):
    """The scenario changes under a provider that is made anew for each call, as after a restart."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.now = folder, 1000.0
        self.markets = {ON_DEMAND: [Prices(11.63)], SPOT: [Prices(3.49)]}
        self.faults: list[Fault] = []
        self.quota: dict[str, int] = {}
        self.command: tuple[str, ...] = ()
        self.startup_s = 0.0

    @property
    def provider(self) -> SimulatedProvider:  # type: ignore[override]
        """Return a provider of the state as it is."""
        offers = tuple(
            offer(key, *market, startup_s=self.startup_s) for key, market in self.markets.items()
        )
        scenario = Scenario(offers, self.quota, tuple(self.faults))
        return SimulatedProvider(scenario, self.folder, lambda: self.now, self.command)

    def stock(self, offer: OfferKey, count: int) -> None:
        """See `Cloud`."""
        price = self.markets[offer][-1].price
        self.markets[offer].append(Prices(price, at=self.now - 1000, stock=count))

    def price(self, offer: OfferKey, price: float) -> None:
        """See `Cloud`."""
        self.markets[offer].append(Prices(price, at=self.now - 1000))

    def lose_answer(self, method: str) -> None:
        """See `Cloud`."""
        self.faults = [Fault(method, 1, done=True)]  # type: ignore[arg-type]

    def lose_call(self, method: str) -> None:
        """See `Cloud`."""
        self.faults = [Fault(method, 1)]  # type: ignore[arg-type]

    def wait(self, seconds: float) -> None:
        """See `Cloud`."""
        self.now += seconds


@pytest.fixture
def cloud(tmp_path: Path) -> SimulatedCloud:
    """A simulated cloud without instances."""
    return SimulatedCloud(tmp_path / "cloud")


class TestContract(ProviderContract, ProtectedSpotContract):
    """The port's promises."""


async def test_quota_bounds_a_group_over_its_offers(cloud: SimulatedCloud) -> None:
    """Other groups are not affected."""
    cloud.quota = {"t4": 1}
    await cloud.provider.launch(Order("a-1", ON_DEMAND, 2))
    with pytest.raises(Quota):
        await cloud.provider.launch(Order("a-2", ON_DEMAND, 1))
    await cloud.provider.launch(Order("a-3", SPOT, 1))
    assert len(await cloud.provider.instances()) == 2


async def test_token_of_another_order_is_refused(cloud: SimulatedCloud) -> None:
    """A token names one offer and one count."""
    await cloud.provider.launch(Order("a-1", ON_DEMAND, 1))
    for order in (Order("a-1", ON_DEMAND, 2), Order("a-1", SPOT, 1)):
        with pytest.raises(Denied, match="that of another order"):
            await cloud.provider.launch(order)


async def test_offer_that_does_not_exist_is_denied(cloud: SimulatedCloud) -> None:
    """The sentence names it."""
    with pytest.raises(Denied, match="no offer gn7 in g"):
        await cloud.provider.launch(Order("a-1", OfferKey("t4", "gn7", "g", "on-demand"), 1))


async def test_throttling_says_when_to_call_again(cloud: SimulatedCloud) -> None:
    """The next call is answered."""
    cloud.faults = [Fault("offers", 1, "throttled")]
    with pytest.raises(Throttled) as why:
        await cloud.provider.offers()
    assert why.value.after_s == 5
    assert await cloud.provider.offers()


async def test_instances_run_when_their_startup_is_over(cloud: SimulatedCloud) -> None:
    """Until then they are starting."""
    cloud.startup_s = 180
    await cloud.provider.launch(Order("a-1", ON_DEMAND, 1))
    assert (await cloud.provider.instances())[0].state == InstanceState.STARTING
    cloud.wait(180)
    assert (await cloud.provider.instances())[0].state == InstanceState.RUNNING


async def test_offers_say_until_when_they_hold(cloud: SimulatedCloud) -> None:
    """The next change of the scenario."""
    cloud.markets[SPOT] = [Prices(3.49), Prices(5.0, at=60, stock=0)]
    (_, before) = await cloud.provider.offers()
    assert (before.price, before.stock, before.until) == (3.49, None, 1060)
    cloud.wait(60)
    (_, after) = await cloud.provider.offers()
    assert (after.price, after.stock, after.until) == (5.0, 0, None)
    with pytest.raises(OutOfStock):
        await cloud.provider.launch(Order("a-1", SPOT, 1))


async def test_only_as_many_are_taken_back_as_the_stock_is_short_of(cloud: SimulatedCloud) -> None:
    """Three, and stock for two: one goes, on demand none."""
    await cloud.provider.launch(Order("a-1", SPOT, 3, cap=SPOT_CAP))
    await cloud.provider.launch(Order("a-2", ON_DEMAND, 3))
    cloud.stock(SPOT, 2)
    cloud.stock(ON_DEMAND, 0)
    cloud.wait(4500)
    left = [it.offer for it in await cloud.provider.instances()]
    assert sorted(left, key=str) == sorted([SPOT] * 2 + [ON_DEMAND] * 3, key=str)


async def test_take_back_is_the_same_however_often_somebody_looks(tmp_path: Path) -> None:
    """A price above the cap at one check only, 70 minutes after the launch."""
    left = []
    for step in (60.0, 700.0, 9000.0):
        cloud = SimulatedCloud(tmp_path / str(step))
        await cloud.provider.launch(Order("a-1", SPOT, 1, cap=SPOT_CAP))
        cloud.markets[SPOT] += [Prices(9.0, at=4190), Prices(3.0, at=4210)]
        gone_at = None
        while gone_at is None and cloud.now < 20000:
            cloud.wait(step)
            if not await cloud.provider.instances():
                gone_at = cloud.now
        left.append(gone_at is not None and gone_at >= 1000 + 4200 + 300)
    assert left == [True, True, True]


@pytest.mark.process
async def test_command_starts_and_ends_nodes(cloud: SimulatedCloud, tmp_path: Path) -> None:
    """Once each; a start that fails is tried again by the next call."""
    log, fails = tmp_path / "log", tmp_path / "fails"
    script = f'test -e {fails} && exit 1; echo "$@" >> {log}'
    cloud.command = ("sh", "-c", script, "command")
    fails.touch()
    (name,) = await cloud.provider.launch(Order("a-1", ON_DEMAND, 1))
    assert not log.exists()
    fails.unlink()
    await cloud.provider.instances()
    await cloud.provider.instances()
    await cloud.provider.end([name])
    await cloud.provider.instances()
    assert log.read_text().splitlines() == [f"start {name} t4 gn6i g", f"end {name}"]


def test_scenario_is_read_from_json(tmp_path: Path) -> None:
    """Unknown keys are errors."""
    scenario = Scenario((offer(SPOT, Prices(3.49), Prices(4.5, at=60, stock=1)),), {"t4": 3})
    path = tmp_path / "scenario.json"
    path.write_bytes(msgspec.json.encode(scenario))
    assert read_scenario(path) == scenario
    path.write_text(json.dumps({"offers": [], "quotas": {}}))
    with pytest.raises(Denied, match="quotas is not known: did you mean quota"):
        read_scenario(path)
