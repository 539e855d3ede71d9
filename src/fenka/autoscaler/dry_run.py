"""What the loop would plan for a cluster that is read once, for commands: as it is, or with further nodes.

The cloud is not asked: prices and stock are those of the leader's last status.
"""

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import replace

from fenka.autoscaler.displaced import displaced_pods
from fenka.autoscaler.machines import less_daemons
from fenka.autoscaler.plan_case import PlanCase, unserved_pods, within_most
from fenka.autoscaler.shape_store import ShapeStore
from fenka.autoscaler.view import View
from fenka.autoscaler.watch import ElasticCluster
from fenka.cloud.config import Config
from fenka.cloud.port import Offer, OfferKey
from fenka.cluster.autoscaling import Status
from fenka.core.planning.plan import Plan, Solver, Unserved, make_plan
from fenka.core.planning.problem import labels_of
from fenka.core.planning.what_if import with_nodes
from fenka.kubernetes.autoscaler_reader import AutoscalerState
from fenka.kubernetes.client import Api
from fenka.kubernetes.cluster_reader import read_scheduler_options

OUT_OF_STOCK = "out of stock"
"""The leader's word for it. Offers that have failed pause because of their orders."""


async def read_view(
    api: Api, published: AutoscalerState, status: Status, config: Config, now: float
) -> View:
    """Return the view of one pass, without instances: orders say what is on its way.

    Args:
        api: the cluster.
        published: by the autoscaler; without a namespace none is installed.
        status: of that.
        config: of that.
        now: the Unix time.

    Raises:
        ApiError: without the right to read the cluster.
        ApiUnreachable: if the API server does not answer.
        InvalidRecord: if the scheduler's options cannot be read.
    """
    options = await read_scheduler_options(api)
    cluster = ElasticCluster(api, options.dialects)
    shapes = ShapeStore(api, published.namespace, config)
    await asyncio.gather(cluster.read(), *([shapes.load()] if published.namespace else []))
    offers = (
        Offer(
            OfferKey(each.group, each.type, each.zone, each.capacity),
            each.price,
            stock=0 if each.state == OUT_OF_STOCK else None,
            machine=each.machine,
        )
        for each in status.offers
    )
    return View(
        now=now,
        config=config,
        state=cluster.state,
        nodes=cluster.nodes.by_name,
        pods=cluster.pods.by_uid,
        pods_on=cluster.pods.by_node,
        groups=cluster.groups,
        daemons=cluster.daemons,
        orders=published.orders,
        offers={offer.key: offer for offer in offers},
        shapes=shapes.shapes,
        misfits=shapes.misfits,
        status=status,
        schedulers=frozenset(status.schedulers),
        displaced=displaced_pods(cluster.nodes.by_name, cluster.pods.by_node, cluster.pods.by_uid),
    )


def dry_run(
    view: View, case: PlanCase, remaining: Callable[[], float], solver: Solver | None
) -> Plan:
    """Return the plan of a view's case, with the reasons that the loop would publish."""
    plan = make_plan(case.case, remaining, solver)
    for _ in case.most:
        narrower = within_most(case, plan)
        if narrower is None:
            break
        plan = make_plan(narrower, remaining, solver)
    unserved = tuple(
        Unserved(request=view.pods[uid].full_name, count=1, why=why)
        for uid, why in unserved_pods(case, plan).items()
    )
    return replace(plan, unserved=unserved)


def what_if(view: View, case: PlanCase, added: Mapping[str, int]) -> PlanCase:
    """Return the case with exactly these new nodes, by the name of an offer or of a node that they are like.

    Raises:
        InvalidCase: if there is no such offer or node, or two names are of one group.
    """
    made = with_nodes(case.case, added)
    groups = tuple(
        # Of offers they are taken off already.
        group if group.name in case.offers else less_daemons(view, group, labels_of(group))
        for group in made.groups
    )
    return replace(case, case=replace(made, groups=groups), most={})
