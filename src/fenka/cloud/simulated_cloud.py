"""The provider `simulated`: a scenario says what can be had, and a command starts and ends nodes.

Its state is a file, so that a simulated cloud outlives whoever uses it, as real ones do. Spot is as on
Alibaba Cloud: a node is launched while the market's price is at most its cap, and is safe for an hour. Then
price and stock are checked every five minutes. A node that fails a check is taken back five minutes later.
"""

import asyncio
import fcntl
import os
import time
from bisect import bisect_right
from collections import Counter
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import ClassVar, Literal, TypeVar

import msgspec

from fenka.cloud import port
from fenka.cloud.config import AutoscalerConfig, InvalidConfig, ProviderConfig, Text
from fenka.formats import documents

SAFE_S = 3600.0
CHECK_S = 300.0
NOTICE_S = 300.0


class SimulatedProviderConfig(ProviderConfig, frozen=True, kw_only=True):
    """The files of a simulated cloud.

    Attributes:
        scenario: file with prices, stock and faults.
        state: file with the cloud's machines, which is written.
        command: words of a program that starts and ends nodes. Empty: nodes exist on paper only.
    """

    scenario: Text = ""
    state: Text = ""
    command: tuple[Text, ...] = ()


class SimulatedConfig(AutoscalerConfig, frozen=True, kw_only=True):
    """The configuration."""

    protection_s: ClassVar[float] = 3600

    provider: SimulatedProviderConfig

    def check_settings(self) -> None:
        """Raise InvalidConfig for the first setting that is missing."""
        for name in ("scenario", "state"):
            if not getattr(self.provider, name):
                raise InvalidConfig(f"provider.{name} is missing: name a file for it")


class Prices(msgspec.Struct, frozen=True):
    """Price and stock from a time on, in seconds since the scenario's start. stock: None for any number."""

    price: float
    at: float = 0.0
    stock: int | None = None


class SimulatedOffer(msgspec.Struct, frozen=True):
    """An offer over time.

    Attributes:
        market: in the order of their times; the first counts before its time too.
        startup_s: from the launch until the machine runs.
    """

    group: str
    type: str
    zone: str
    market: tuple[Prices, ...]
    capacity: Literal["on-demand", "spot"] = "on-demand"
    startup_s: float = 0.0

    @property
    def key(self) -> port.OfferKey:
        """Return its name."""
        return port.OfferKey(self.group, self.type, self.zone, self.capacity)

    def at(self, seconds: float) -> tuple[Prices, float | None]:
        """Return price and stock then, and until when they hold."""
        position = bisect_right([prices.at for prices in self.market], seconds)
        until = self.market[position].at if position < len(self.market) else None
        return self.market[max(position - 1, 0)], until


class Fault(msgspec.Struct, frozen=True):
    """A call that fails.

    Attributes:
        method: of the port.
        call: which call of the method, from 1 on.
        error: what is raised.
        done: whether the deed is done and only its answer is lost.
    """

    method: Literal["offers", "instances", "launch", "end", "notices"]
    call: int
    error: Literal["unknown", "throttled", "denied"] = "unknown"
    done: bool = False


class Scenario(msgspec.Struct, frozen=True):
    """Prices, stock and faults of a simulated cloud over time. quota: nodes by group."""

    offers: tuple[SimulatedOffer, ...]
    quota: dict[str, int] = {}
    faults: tuple[Fault, ...] = ()


class SimulatedMachine(msgspec.Struct):
    """An instance and its order.

    Attributes:
        started: whether the command that starts its node has succeeded.
        checked_at: the time of the last check of spot's rules.
        taken_at: when it is taken back, None if that is not announced.
        announced: why.
    """

    id: str
    offer: int
    token: str
    launched_at: float
    cap: float | None
    checked_at: float
    started: bool = False
    taken_at: float | None = None
    announced: str = ""


class Launched(msgspec.Struct):
    """The outcome of an order."""

    offer: port.OfferKey
    count: int
    ids: list[str]


class CloudState(msgspec.Struct):
    """All that a simulated cloud remembers.

    Attributes:
        began_at: the time of its first call; the scenario's times count from here.
        machines: instances that are not gone.
        gone: instances whose nodes have to be ended.
    """

    began_at: float
    machines: dict[str, SimulatedMachine] = {}
    gone: list[str] = []
    orders: dict[str, Launched] = {}
    calls: dict[str, int] = {}
    next_id: int = 1


class Market:
    """A cloud at one moment. Every method is complete, so that the state may be stored after it."""

    def __init__(self, scenario: Scenario, state: CloudState, now: float) -> None:
        self._scenario, self.state, self._now = scenario, state, now
        self._keys = [offer.key for offer in scenario.offers]
        self._take_back()

    def fault(self, method: str) -> tuple[port.ProviderError, bool] | None:
        """Count a call. Return its error, and whether the deed is done nevertheless."""
        number = self.state.calls[method] = self.state.calls.get(method, 0) + 1
        for fault in self._scenario.faults:
            if (fault.method, fault.call) == (method, number):
                return _ERRORS[fault.error](), fault.done
        return None

    def offers(self) -> list[port.Offer]:
        """Return the offers as they are now."""
        listed = []
        for number, offer in enumerate(self._scenario.offers):
            prices, until = offer.at(self._elapsed)
            stock = self._stock(number)
            absolute = None if until is None else self.state.began_at + until
            listed.append(port.Offer(offer.key, prices.price, stock, absolute))
        return listed

    def instances(self) -> list[port.Instance]:
        """Return the instances that are not gone."""
        return [
            port.Instance(
                machine.id,
                f"simulated:///{self._keys[machine.offer].zone}/{machine.id}",
                self._keys[machine.offer],
                machine.token,
                self._state_of(machine),
                machine.launched_at,
            )
            for machine in self.state.machines.values()
        ]

    def launch(self, order: port.Order) -> list[str]:
        """Launch what stock and quota allow of an order. Return its ids, also if it is repeated."""
        known = self.state.orders.get(order.token)
        if known is not None:
            if (known.offer, known.count) != (order.offer, order.count):
                raise port.Denied(f"token {order.token} is that of another order")
            return known.ids
        if order.offer not in self._keys:
            raise port.NoOffer(order.offer)
        number = self._keys.index(order.offer)
        price = self._scenario.offers[number].at(self._elapsed)[0].price
        if order.cap is not None and price > order.cap:
            raise port.TooDear(order.offer, price, order.cap)
        stock, room = self._stock(number), self._quota(order.offer.group)
        least = order.count if order.whole else 1
        if room is not None and room < least:
            raise port.Quota(order.offer.group)
        if stock is not None and stock < least:
            raise port.OutOfStock(order.offer)
        count = min(bound for bound in (order.count, stock, room) if bound is not None)
        first = self.state.next_id
        ids = [f"i-{number:06d}" for number in range(first, first + count)]
        self.state.next_id += count
        for name in ids:
            self.state.machines[name] = SimulatedMachine(
                name, number, order.token, self._now, order.cap, self._now
            )
        self.state.orders[order.token] = Launched(order.offer, order.count, ids)
        return ids

    def end(self, ids: Collection[str]) -> None:
        """End instances."""
        for name in ids:
            self._remove(name)

    def notices(self) -> list[port.ReclaimNotice]:
        """Return the take-backs that are announced."""
        return [
            port.ReclaimNotice(machine.id, machine.taken_at, machine.announced)
            for machine in self.state.machines.values()
            if machine.taken_at is not None
        ]

    # ---- inside ----

    @property
    def _elapsed(self) -> float:
        return self._now - self.state.began_at

    def _state_of(self, machine: SimulatedMachine) -> port.InstanceState:
        if machine.taken_at is not None:
            return port.InstanceState.ENDING
        startup_s = self._scenario.offers[machine.offer].startup_s
        running = self._now >= machine.launched_at + startup_s
        return port.InstanceState.RUNNING if running else port.InstanceState.STARTING

    def _stock(self, number: int) -> int | None:
        stock = self._scenario.offers[number].at(self._elapsed)[0].stock
        if stock is None:
            return None
        used = sum(machine.offer == number for machine in self.state.machines.values())
        return max(stock - used, 0)

    def _quota(self, group: str) -> int | None:
        if group not in self._scenario.quota:
            return None
        used = sum(
            self._keys[machine.offer].group == group for machine in self.state.machines.values()
        )
        return max(self._scenario.quota[group] - used, 0)

    def _take_back(self) -> None:
        """Make all checks that were due up to now, in the order of their times."""
        due = sorted(
            (moment, machine.id)
            for machine in self.state.machines.values()
            if self._keys[machine.offer].capacity == "spot"
            for moment in _checks(machine, self._now)
        )
        for moment, name in due:
            machine = self.state.machines.get(name)
            self._remove_taken(moment)
            if machine is None or name not in self.state.machines or machine.taken_at is not None:
                continue
            machine.checked_at = moment
            if why := self._fails(machine, moment):
                machine.taken_at, machine.announced = moment + NOTICE_S, why
        self._remove_taken(self._now)

    def _fails(self, machine: SimulatedMachine, moment: float) -> str:
        prices, _ = self._scenario.offers[machine.offer].at(moment - self.state.began_at)
        if machine.cap is not None and prices.price > machine.cap:
            return f"the market's price of {prices.price:g} is above the cap of {machine.cap:g}"
        of_offer = Counter(
            machine.offer for machine in self.state.machines.values() if machine.taken_at is None
        )
        if prices.stock is not None and of_offer[machine.offer] > prices.stock:
            return "the stock is short"
        return ""

    def _remove_taken(self, moment: float) -> None:
        gone = [
            machine.id
            for machine in self.state.machines.values()
            if machine.taken_at is not None and machine.taken_at <= moment
        ]
        for name in gone:
            self._remove(name)

    def _remove(self, name: str) -> None:
        if self.state.machines.pop(name, None) is not None:
            self.state.gone.append(name)


def _checks(machine: SimulatedMachine, now: float) -> Sequence[float]:
    """Return the times of the checks of an instance after its last one, up to now."""
    first = machine.launched_at + SAFE_S
    done = int((machine.checked_at - first) // CHECK_S) + 1 if machine.checked_at >= first else 0
    due = int((now - first) // CHECK_S) + 1 if now >= first else 0
    return [first + number * CHECK_S for number in range(done, due)]


_ERRORS: dict[str, Callable[[], port.ProviderError]] = {
    "unknown": lambda: port.Unknown("the cloud did not answer"),
    "throttled": port.Throttled,
    "denied": lambda: port.Denied("the account may not do this"),
}


T = TypeVar("T")


@asynccontextmanager
async def open_provider(
    config: SimulatedConfig, clock: Callable[[], float] = time.time
) -> AsyncIterator["SimulatedProvider"]:
    """Provide what the scenario of a configuration offers. Raises InvalidConfig, Denied, OSError."""
    config.check_settings()
    settings = config.provider
    scenario = read_scenario(Path(settings.scenario))
    yield SimulatedProvider(scenario, Path(settings.state), clock, settings.command)


def read_scenario(path: Path) -> Scenario:
    """Return the scenario of a file. Raises Denied with one sentence, OSError."""
    try:
        return documents.decode_json(path.read_bytes(), Scenario, "the scenario")
    except documents.InvalidDocument as why:
        raise port.Denied(f"{path} is no scenario of a simulated cloud: {why}") from None


class SimulatedProvider:
    """A `Provider`. Several processes may use the same state."""

    def __init__(
        self,
        scenario: Scenario,
        folder: Path,
        clock: Callable[[], float],
        command: Sequence[str] = (),
    ) -> None:
        """Use a state, which is made if there is none.

        Args:
            scenario: what can be had.
            folder: of the state.
            clock: returns the time.
            command: is run with `start ID GROUP TYPE ZONE`, and with `end ID`. It is run again if it failed
                or was killed, so doing it twice must be no error.
        """
        self._scenario, self._clock, self._command = scenario, clock, tuple(command)
        self._folder, self._path = folder, folder / "cloud.json"

    async def offers(self) -> Sequence[port.Offer]:
        """Return all offers as they are now."""
        return await self._call("offers", Market.offers)

    async def instances(self) -> Sequence[port.Instance]:
        """Return all instances that are not gone."""
        return await self._call("instances", Market.instances)

    async def launch(self, order: port.Order) -> Sequence[str]:
        """Launch an order once. Return its ids."""
        return await self._call("launch", lambda market: market.launch(order))

    async def end(self, ids: Collection[str]) -> None:
        """End instances."""
        await self._call("end", lambda market: market.end(ids))

    async def notices(self) -> Sequence[port.ReclaimNotice]:
        """Return the take-backs that are announced."""
        return await self._call("notices", Market.notices)

    async def _call(self, method: str, act: Callable[[Market], T]) -> T:
        async with self._locked():
            now = self._clock()
            state = self._read(now)
            market = Market(self._scenario, state, now)
            fault = market.fault(method)
            try:
                if fault is not None and not fault[1]:
                    raise fault[0]
                result = act(market)
            finally:
                self._write(state)
            await self._operate(state)
            if fault is not None:
                raise fault[0]
            return result

    @asynccontextmanager
    async def _locked(self) -> AsyncIterator[None]:
        self._folder.mkdir(parents=True, exist_ok=True)
        with (self._folder / "lock").open("w") as lock:
            # Another process may run a command meanwhile.
            await asyncio.to_thread(fcntl.flock, lock, fcntl.LOCK_EX)
            yield

    async def _operate(self, state: CloudState) -> None:
        """Start and end nodes. Each success is written at once, so that little is repeated."""
        for machine in [machine for machine in state.machines.values() if not machine.started]:
            key = self._scenario.offers[machine.offer].key
            if await self._run("start", machine.id, key.group, key.type, key.zone):
                machine.started = True
                self._write(state)
        for name in list(state.gone):
            if await self._run("end", name):
                state.gone.remove(name)
                self._write(state)

    async def _run(self, *words: str) -> bool:
        if not self._command:
            return True
        process = await asyncio.create_subprocess_exec(*self._command, *words)
        return await process.wait() == 0

    def _read(self, now: float) -> CloudState:
        try:
            return msgspec.json.decode(self._path.read_bytes(), type=CloudState)
        except FileNotFoundError:
            return CloudState(began_at=now)

    def _write(self, state: CloudState) -> None:
        fresh = self._path.with_suffix(".new")
        with fresh.open("wb") as file:
            file.write(msgspec.json.encode(state))
            file.flush()
            os.fsync(file.fileno())
        fresh.replace(self._path)
