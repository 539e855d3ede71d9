"""Asks the cloud for written orders. A call that takes long holds back nothing else of a pass."""

import asyncio
from collections.abc import Iterable, Sequence

from fenka.autoscaler.hands import Hands
from fenka.autoscaler.lifecycle import answered, launchable, refused
from fenka.cloud.port import Order, Provider, ProviderError, Throttled, Unknown
from fenka.cluster.autoscaling import OrderRecord

REPEAT_S = 2.0
"""Between two requests for the same order, while the answer is lost."""
LAUNCH_TIMEOUT_S = 60.0
"""A cloud that does not answer for so long is asked again with the same token."""
WAIT_S = 1.0
"""A pass waits so long for answers; later ones are for the next passes."""
LOOK_S = 0.5
"""Between two passes while a call runs."""


class Asker:
    """Keeps the calls that run from one pass to the next."""

    def __init__(self) -> None:
        self._calls: dict[str, tuple[Order, asyncio.Task[Sequence[str] | ProviderError]]] = {}
        self._again_at: dict[str, float] = {}
        """When orders may be asked for again."""

    def forget(self) -> None:
        """Ask at once for what is not answered: another replica was the leader."""
        self._again_at.clear()

    def stop(self) -> None:
        """Cancel the calls. The next leader repeats them."""
        for _, call in self._calls.values():
            call.cancel()
        self._calls.clear()

    def due_at(self, now: float) -> Iterable[float]:
        """Return when the next pass must be made."""
        return (*self._again_at.values(), *([now + LOOK_S] if self._calls else ()))

    async def act(self, hands: Hands) -> None:
        """Ask for written orders, and write what the cloud has answered by now."""
        view = hands.view()
        unanswered = {
            name: launchable(view.config.cluster, name, record)
            for name, record in hands.orders.records.items()
            if any(slot.state == "written" for slot in record.slots)
        }
        self._again_at = {name: at for name, at in self._again_at.items() if name in unanswered}
        for name, order in unanswered.items():
            due = view.now >= self._again_at.get(name, view.now)
            if due and name not in self._calls and hands.leading():
                self._calls[name] = order, asyncio.create_task(_launch(hands.provider, order))
        if not self._calls:
            return
        await asyncio.wait([call for _, call in self._calls.values()], timeout=WAIT_S)
        if hands.leading():
            await hands.orders.save(self._answers(hands))

    def _answers(self, hands: Hands) -> dict[str, OrderRecord]:
        """Return the orders that are answered. An answer to another attempt counts for nothing."""
        view, changed = hands.view(), dict[str, OrderRecord]()
        for name in [name for name, (_, call) in self._calls.items() if call.done()]:
            order, call = self._calls.pop(name)
            record, answer = hands.orders.records.get(name), call.result()
            if record is None or launchable(view.config.cluster, name, record).token != order.token:
                continue
            self._again_at.pop(name, None)
            if not isinstance(answer, ProviderError):
                changed[name] = answered(record, answer, view.now)
                continue
            hands.warnings.warn(f"order {name}", str(answer))
            changed[name] = refused(record, answer, view.now)
            if changed[name].failure is None:
                pause = answer.after_s if isinstance(answer, Throttled) else REPEAT_S
                self._again_at[name] = view.now + pause
        return changed


async def _launch(provider: Provider, order: Order) -> Sequence[str] | ProviderError:
    """Return the ids that are known by now, or why there are none."""
    try:
        async with asyncio.timeout(LAUNCH_TIMEOUT_S):
            return await provider.launch(order)
    except ProviderError as why:
        return why
    except TimeoutError:
        return Unknown("the cloud did not answer")
