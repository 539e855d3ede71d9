"""A provider without a cloud: a scenario says what can be had, and a command starts and ends nodes.

Its state is a file, so that a simulated cloud outlives whoever uses it, as real ones do.
"""

import asyncio
import fcntl
import os
import time
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TypeVar

import msgspec

from fenka.cloud.config import Config
from fenka.cloud.config_values import InvalidConfig
from fenka.cloud.market import CloudState, Market, Scenario
from fenka.cloud.port import Denied, Instance, Notice, Offer, Order

T = TypeVar("T")


@asynccontextmanager
async def open_provider(
    config: Config, clock: Callable[[], float] = time.time
) -> AsyncIterator["SimulatedProvider"]:
    """Provide what the scenario of a configuration offers. Raises InvalidConfig, Denied, OSError."""
    check_settings(config)
    settings = config.provider.settings
    scenario = read_scenario(Path(settings["scenario"]))
    command = tuple(settings.get("command", ()))
    yield SimulatedProvider(scenario, Path(settings["state"]), clock, command)


def check_settings(config: Config) -> None:
    """Raise InvalidConfig for the first setting that is missing."""
    for name in ("scenario", "state"):
        if name not in config.provider.settings:
            raise InvalidConfig(f"provider.{name} is missing: name a file for it")


def read_scenario(path: Path) -> Scenario:
    """Return the scenario of a file. Raises Denied with one sentence, OSError."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=Scenario)
    except msgspec.MsgspecError as why:
        raise Denied(f"{path} is no scenario of a simulated cloud: {why}") from None


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

    async def offers(self) -> Sequence[Offer]:
        """Return all offers as they are now."""
        return await self._call("offers", Market.offers)

    async def instances(self) -> Sequence[Instance]:
        """Return all instances that are not gone."""
        return await self._call("instances", Market.instances)

    async def launch(self, order: Order) -> Sequence[str]:
        """Launch an order once. Return its ids."""
        return await self._call("launch", lambda market: market.launch(order))

    async def end(self, ids: Collection[str]) -> None:
        """End instances."""
        await self._call("end", lambda market: market.end(ids))

    async def notices(self) -> Sequence[Notice]:
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
        """Start and end nodes. What succeeded is written at once, so that little is repeated."""
        for machine in [it for it in state.machines.values() if not it.started]:
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
