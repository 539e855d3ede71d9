"""What every provider promises: the tests of the port. A provider's own test module inherits them."""

from abc import ABC, abstractmethod
from collections.abc import Iterable

import pytest

from fenka.cloud.config import AutoscalerConfig, InvalidConfig
from fenka.cloud.config_file import check_offers
from fenka.cloud.port import InstanceState, OfferKey, Order, OutOfStock, Provider, TooDear, Unknown

ON_DEMAND = OfferKey("t4", "gn6i", "g", "on-demand")
SPOT = OfferKey("t4-spot", "gn6i", "g", "spot")
SPOT_CAP = 4.0


def refusal(config: AutoscalerConfig, offers: Iterable[OfferKey]) -> str:
    """Return why the autoscaler does not start when a provider has these offers, empty if it does."""
    try:
        check_offers(config, offers)
    except InvalidConfig as why:
        return str(why)
    return ""


class Cloud(ABC):
    """A cloud for tests: two offers, `on_demand` for 11.63 and `spot` for 3.49.

    Attributes:
        tells_stock: whether its offers have a stock.
    """

    provider: Provider
    on_demand = ON_DEMAND
    spot = SPOT
    tells_stock = True

    @abstractmethod
    def stock(self, offer: OfferKey, count: int) -> None:
        """Let so many of an offer be had."""

    @abstractmethod
    def price(self, offer: OfferKey, price: float) -> None:
        """Set the market's price."""

    @abstractmethod
    def lose_answer(self, method: str) -> None:
        """Let the next call of a method be done, and its answer be lost."""

    @abstractmethod
    def lose_call(self, method: str) -> None:
        """Let the next call of a method fail before anything is done."""

    @abstractmethod
    def wait(self, seconds: float) -> None:
        """Let time pass."""


class ProviderContract:
    """The tests. `cloud` is a fixture of the subclass."""

    async def test_offers_have_price_and_stock(self, cloud: Cloud) -> None:
        """As they are now."""
        cloud.stock(cloud.spot, 2)
        offers = {offer.key: offer for offer in await cloud.provider.offers()}
        assert offers[cloud.on_demand].price == 11.63
        assert offers[cloud.spot].price == 3.49
        if cloud.tells_stock:
            assert offers[cloud.spot].stock == 2

    async def test_launched_instances_are_listed_with_offer_and_order(self, cloud: Cloud) -> None:
        """From the moment of the launch."""
        await cloud.provider.launch(Order("a-1", cloud.on_demand, 2))
        listed = await cloud.provider.instances()
        assert [(it.offer, it.order) for it in listed] == [(cloud.on_demand, "a-1")] * 2
        assert len({it.id for it in listed} | {it.provider_id for it in listed}) == 4

    async def test_launch_is_one_order_when_it_is_repeated(self, cloud: Cloud) -> None:
        """Also after its instances have ended: the token is spent."""
        order = Order("a-1", cloud.on_demand, 2)
        first = await cloud.provider.launch(order)
        assert list(await cloud.provider.launch(order)) == list(first)
        assert len(await cloud.provider.instances()) == 2
        await cloud.provider.end([it.id for it in await cloud.provider.instances()])
        await cloud.provider.launch(order)
        assert not await cloud.provider.instances()

    async def test_launch_makes_one_set_when_its_answer_is_lost(self, cloud: Cloud) -> None:
        """The error is Unknown, and the same token finds what was done."""
        cloud.lose_answer("launch")
        with pytest.raises(Unknown):
            await cloud.provider.launch(Order("a-1", cloud.on_demand, 2))
        await cloud.provider.launch(Order("a-1", cloud.on_demand, 2))
        assert len(await cloud.provider.instances()) == 2

    async def test_launch_makes_one_set_when_its_call_is_lost(self, cloud: Cloud) -> None:
        """Nothing was done the first time."""
        cloud.lose_call("launch")
        with pytest.raises(Unknown):
            await cloud.provider.launch(Order("a-1", cloud.on_demand, 2))
        assert not await cloud.provider.instances()
        await cloud.provider.launch(Order("a-1", cloud.on_demand, 2))
        assert len(await cloud.provider.instances()) == 2

    async def test_launch_gives_a_part_when_stock_is_short(self, cloud: Cloud) -> None:
        """Two of three."""
        cloud.stock(cloud.on_demand, 2)
        await cloud.provider.launch(Order("a-1", cloud.on_demand, 3))
        assert len(await cloud.provider.instances()) == 2

    async def test_launch_gives_nothing_when_a_whole_order_is_short_of_stock(
        self, cloud: Cloud
    ) -> None:
        """The error names the offer; with enough stock a new token succeeds."""
        cloud.stock(cloud.on_demand, 2)
        with pytest.raises(OutOfStock) as why:
            await cloud.provider.launch(Order("a-1", cloud.on_demand, 3, whole=True))
        assert why.value.offer == cloud.on_demand
        assert not await cloud.provider.instances()
        cloud.stock(cloud.on_demand, 3)
        await cloud.provider.launch(Order("a-2", cloud.on_demand, 3, whole=True))
        assert len(await cloud.provider.instances()) == 3

    async def test_launch_is_refused_when_the_market_is_above_the_cap(self, cloud: Cloud) -> None:
        """At the cap it is not."""
        cloud.price(cloud.spot, SPOT_CAP + 0.01)
        with pytest.raises(TooDear):
            await cloud.provider.launch(Order("a-1", cloud.spot, 1, cap=SPOT_CAP))
        assert not await cloud.provider.instances()
        cloud.price(cloud.spot, SPOT_CAP)
        await cloud.provider.launch(Order("a-2", cloud.spot, 1, cap=SPOT_CAP))
        assert len(await cloud.provider.instances()) == 1

    async def test_end_ends_what_it_names_and_ignores_what_is_gone(self, cloud: Cloud) -> None:
        """Twice is no error, nor is an unknown id."""
        await cloud.provider.launch(Order("a-1", cloud.on_demand, 2))
        first, second = await cloud.provider.instances()
        for _ in range(2):
            await cloud.provider.end([first.id, "i-unknown"])
        left = [it for it in await cloud.provider.instances() if it.state != InstanceState.ENDING]
        assert [it.id for it in left] == [second.id]

    async def test_instances_raise_when_the_cloud_does_not_answer(self, cloud: Cloud) -> None:
        """A part of them would look as if the others were gone."""
        cloud.lose_call("instances")
        with pytest.raises(Unknown):
            await cloud.provider.instances()


class ProtectedSpotContract:
    """The tests of clouds that keep spot nodes for an hour and announce a take-back five minutes before."""

    async def test_spot_is_safe_for_an_hour_then_taken_back_with_notice(self, cloud: Cloud) -> None:
        """The price is above the cap from the start; nobody is told before the hour is over."""
        await cloud.provider.launch(Order("a-1", cloud.spot, 1, cap=SPOT_CAP))
        cloud.price(cloud.spot, SPOT_CAP + 1)
        cloud.wait(3599)
        assert not await cloud.provider.notices()
        cloud.wait(300)
        (notice,) = await cloud.provider.notices()
        (instance,) = await cloud.provider.instances()
        assert notice.instance == instance.id
        assert notice.at - instance.launched_at == pytest.approx(3900, abs=300)
        cloud.wait(600)
        assert not await cloud.provider.instances()
        assert not await cloud.provider.notices()
