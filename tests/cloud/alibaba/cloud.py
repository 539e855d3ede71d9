"""A fake of Alibaba Cloud: checks calls, finds their actions, keeps tokens and state."""

import re
import uuid
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any

from fenka.cloud.port import OfferKey, Order, OutOfStock, ProviderError, Quota, TooDear
from fenka.cloud.simulated_cloud import Market, Scenario, SimulatedMachine, SimulatedOffer
from fenka.core.nodes.case import Capacity
from tests.cloud.alibaba.protocol import Call, CloudError, check_signature, read_parameters
from tests.cloud.alibaba.state import Details, Folder, ScalingGroup, Spent, fingerprint

Action = Callable[["Cloud", dict[str, Any]], dict[str, Any]]

ACTIONS: dict[tuple[str, str], tuple[type, Action]] = {}
"""By version and name: the SDK's request class, and what is done."""


def action(version: str, model: type) -> Callable[[Action], Action]:
    """Register a function as the action of a request class."""

    def register(function: Action) -> Action:
        name = re.sub(r"(Shrink)?Request$", "", model.__name__)
        ACTIONS[version, name] = (model, function)
        return function

    return register


class Cloud:
    """The cloud at one moment: files are read when it is made, and written by `keep`."""

    def __init__(self, folder: Folder, real_now: float) -> None:
        self.folder, self.land = folder, folder.landscape()
        self.now = folder.now(real_now)
        self.state = folder.state(self.now)
        quota = {} if self.land.quota is None else {"": self.land.quota}
        self.market = Market(Scenario(self.land.offers, quota), self.state.cloud, self.now)
        self.settle()

    def keep(self) -> None:
        """Store the state."""
        for name in set(self.state.details) - set(self.machines):
            del self.state.details[name]
        self.folder.keep(self.state)

    @property
    def machines(self) -> dict[str, SimulatedMachine]:
        """The instances that are not gone."""
        return self.state.cloud.machines

    def key(self, machine: SimulatedMachine) -> OfferKey:
        """Return what an instance was bought as."""
        return self.land.offers[machine.offer].key

    def offer(self, kind: str, zone: str, capacity: Capacity) -> SimulatedOffer | None:
        """Return an offer, None if there is none."""
        keys = (OfferKey("", kind, zone, capacity),)
        return next((it for it in self.land.offers if it.key in keys), None)

    def answer(self, call: Call, real_now: float) -> tuple[int, dict[str, Any]]:
        """Return the status and the body of a call's answer."""
        try:
            check_signature(call, self.land.secrets, real_now)
            name = call.headers["x-acs-action"]
            model, act = _find(call.headers["x-acs-version"], name)
            self.state.calls.append(name)
            return self._act_once(name, act, read_parameters(model, call.query))
        except CloudError as why:
            return why.status, _error(why)

    def _act_once(
        self, name: str, act: Action, given: dict[str, Any]
    ) -> tuple[int, dict[str, Any]]:
        region = given.get("RegionId", self.land.region)
        if region != self.land.region:
            raise CloudError(
                404, "InvalidRegionId.NotFound", "The specified RegionId does not exist."
            )
        token = given.pop("ClientToken", None)
        if token is None:
            return 200, act(self, given)
        if not (0 < len(token) <= 64 and token.isascii()):
            raise CloudError(
                400, "InvalidClientToken.ValueNotSupported", "The ClientToken is invalid."
            )
        asked = fingerprint(name, given)
        spent = self.state.tokens.get(token)
        if spent is None:
            try:
                spent = Spent(asked, 200, act(self, given))
            except CloudError as why:
                spent = Spent(asked, why.status, _error(why))
            self.state.tokens[token] = spent
        elif spent.parameters != asked:
            raise CloudError(
                400, "IdempotentParameterMismatch", "The token was used with other parameters."
            )
        return spent.status, spent.answer

    def launch(self, order: Order, details: Details) -> list[str]:
        """Launch instances of one offer. Raise CloudError."""
        try:
            ids = self.market.launch(order)
        except ProviderError as why:
            raise _REFUSALS[type(why)] from why
        self.state.details |= {
            name: Details(dict(details.tags), details.group, details.activity) for name in ids
        }
        return ids

    # ---- scaling groups ----

    def group(self, name: str) -> ScalingGroup:
        """Return a scaling group. Raise CloudError."""
        group = next((it for it in self.land.groups if it.id == name), None)
        if group is None:
            raise CloudError(
                404, "InvalidScalingGroupId.NotFound", "The scaling group does not exist."
            )
        return group

    def members(self, group: str) -> list[str]:
        """Return the instances of a scaling group."""
        return [name for name in self.machines if self.state.details[name].group == group]

    def allocate(self, group: ScalingGroup, amount: int) -> tuple[list[tuple[OfferKey, int]], str]:
        """Return what a group would launch, and the error code if that is not all."""
        room = max(min(amount, group.max - len(self.members(group.id))), 0)
        stock = {offer.key: offer for offer in self.market.offers()}
        chosen, left, error = [], room, ""
        for zone in group.zones:
            for kind in group.types:
                offer = stock.get(key := OfferKey("", kind, zone, group.capacity))
                if offer is None or left == 0:
                    continue
                if group.cap is not None and offer.price > group.cap:
                    error = "InvalidSpotPriceLimit.LowerThanPublicPrice"
                    continue
                count = left if offer.stock is None else min(left, offer.stock)
                chosen += [(key, count)] if count else []
                left -= count
        return chosen, (error or "OperationDenied.NoStock") if left else ""

    def settle(self) -> None:
        """Complete the activities whose time has come."""
        for activity in self.state.activities.values():
            if activity.status != "InProgress" or activity.ends_at > self.now:
                continue
            self.market.end(activity.remove)
            group = self.group(activity.group)
            chosen, activity.error = self.allocate(group, activity.launch)
            details = Details(
                group.tags | {"acs:autoscaling:scalingGroupId": group.id}, group.id, activity.id
            )
            for number, (key, count) in enumerate(chosen):
                order = Order(f"{activity.id}-{number}", key, count, cap=group.cap)
                try:
                    activity.created += self.launch(order, details)
                except CloudError as why:
                    activity.error = why.code
            activity.status = (
                "Successful" if not activity.error else "Warning" if chosen else "Failed"
            )
            if activity.launch and not chosen and not activity.error:
                activity.status = "Rejected"


def _find(version: str, name: str) -> tuple[type, Action]:
    if (version, name) not in ACTIONS:
        raise CloudError(404, "InvalidAction.NotFound", "Specified api is not found.")
    return ACTIONS[version, name]


_REFUSALS: Mapping[type[ProviderError], CloudError] = {
    OutOfStock: CloudError(
        403, "OperationDenied.NoStock", "The requested resource is sold out in the zone."
    ),
    TooDear: CloudError(
        400,
        "InvalidSpotPriceLimit.LowerThanPublicPrice",
        "The parameter spotPriceLimit is lower than the current public price.",
    ),
    Quota: CloudError(
        403, "QuotaExceed.ElasticQuota", "The number of instances exceeds the quota."
    ),
}


def _error(why: CloudError) -> dict[str, Any]:
    request = str(uuid.uuid4()).upper()
    return {"Code": why.code, "Message": why.message, "RequestId": request, "HostId": "fake"}


def minute(seconds: float) -> str:
    """Return a time as the cloud writes times of creation."""
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%MZ")


def second(seconds: float) -> str:
    """Return a time as the cloud writes most times."""
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
