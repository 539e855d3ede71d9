"""`fenka mig`: cards that are divided into instances (docs/do/mig-here.md)."""

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from fenka.cli import cluster, tables
from fenka.cli.common_options import OutputOption, Target, group, register
from fenka.cli.error_report import UserError
from fenka.cli.screen_layouts import free_text
from fenka.cli.world import snapshot_here
from fenka.core.errors import INVALID_INPUT, TEMPORARY_FAILURE
from fenka.core.mig.case import Create, Destroy, Enable, MigCase, MigPlan, Step
from fenka.core.units import MIB
from fenka.formats import mig_parted
from fenka.formats.mig_case import decode_case, plan_record
from fenka.kubernetes.api_client import Api
from fenka.kubernetes.reader import read_cluster
from fenka.views.mig_rows import MigCardView, divided_cards
from fenka.workstation import paths, protocol
from fenka.workstation.client import DaemonConnection

app = group("Divide cards into MIG instances, and plan layouts.")

FileOption = Annotated[
    Path, typer.Option("--file", "-f", metavar="FILE", help="a configuration file of mig-parted")
]
ConfigOption = Annotated[
    str, typer.Option("--config", "-c", metavar="NAME", help="the configuration in it")
]

MAX_BYTES = 64 * MIB
"""More than any case or configuration."""

SUMMARY = "Compute the best steps for a case: cards, instances and requests in a file."


def plan(
    case: Annotated[
        Path, typer.Option("--case", metavar="FILE", help="the case as JSON (docs/do/plan-mig.md)")
    ],
    output: OutputOption = "table",
) -> None:
    """Print the steps that serve the most requests."""
    from fenka.core.mig import plan as planner

    problem = decode_case(read_input(case))
    result = planner.plan(problem)
    if not tables.print_data(plan_record(result), output):
        tables.print_lines(_lines(problem, result))


def _lines(case: MigCase, plan: MigPlan) -> list[str]:
    lines = [_sentence(step) for step in plan.steps] or ["no layout changes"]
    targets = {**plan.served, **plan.moved}
    lines += [f"{name}: {target.card} at {target.start}" for name, target in targets.items()]
    waiting = [request.name for request in case.requests if request.name not in plan.served]
    lines += [f"{name}: waits" for name in waiting]
    kinds = Counter(type(step) for step in plan.steps)
    lines.append(
        f"{len(plan.served)} of {len(case.requests)} requests served, {len(plan.moved)} jobs moved, "
        f"MIG enabled on {kinds[Enable]} cards"
    )
    return lines


def _sentence(step: Step) -> str:
    match step:
        case Enable(card):
            return f"enable MIG on {card}"
        case Destroy(card, place):
            return f"destroy {place} on {card}"
        case Create(card, place):
            return f"create {place} on {card}"


register(app, plan, SUMMARY)


def list_instances(target: Target, output: OutputOption = "table") -> None:
    """Print each card with its instances and what else fits; of a cluster, each divided card."""
    if snapshot_here(target) is None:
        nodes = cluster.ask(target, _cluster_cards, cluster.explain_cluster_denial)
        if not tables.print_data(nodes, output):
            rows = [(node.name, *row) for node in nodes for row in _rows(node.cards)]
            room = [line for node in nodes for line in _room(node.cards, node.name)]
            table = tables.align_to_terminal([("NODE", *COLUMNS), *rows])
            tables.print_lines([*table, *room])
        return
    cards = _cards()
    if not tables.print_data(cards, output):
        waits = [f"waits: {line}" for card in cards for line in card.waiting]
        table = tables.align_to_terminal([COLUMNS, *_rows(cards)])
        tables.print_lines([*table, *_room(cards), *waits])


COLUMNS = ("CARD", "STATE", "PROFILE", "MEMORY", "CORE", "OWNER", "HELD BY", "UUID")


def _rows(cards: Iterable[MigCardView]) -> Iterator[tuple[str, ...]]:
    for card in cards:
        if not card.enabled:
            state = "whole" if card.profiles else "no MIG"
            yield str(card.index), state, "-", "-", "-", "-", "-", card.uuid
            continue
        for instance in card.instances:
            held = ",".join(instance.jobs) or ("-" if instance.owner == "fenka" else "?")
            place, core = f"{card.index}/{instance.start}", f"{instance.compute}%"
            memory = f"{instance.memory_mib}MiB"
            owner, uuid = instance.owner, instance.uuid or "-"
            yield place, "instance", instance.profile, memory, core, owner, held, uuid
        state = "has room" if card.free else "full"
        yield str(card.index), state, "-", "-", "-", "-", "-", card.uuid


def _room(cards: Iterable[MigCardView], node: str = "") -> Iterator[str]:
    """Yield a line for each card with room for more instances."""
    for card in cards:
        if card.enabled and card.free:
            yield f"room on card {card.index}{node and f' of {node}'}: {free_text(card.free)}"


@dataclass(frozen=True, slots=True)
class NodeCards:
    """A node of a cluster with its divided cards."""

    name: str
    cards: list[MigCardView]


async def _cluster_cards(api: Api) -> list[NodeCards]:
    state = cluster.keep(await read_cluster(api)).state
    return [
        NodeCards(shared.node.name, divided_cards(shared, state.allocations(shared.node.name)))
        for shared in state.shared_nodes()
        if shared.division.geometries
    ]


def export() -> None:
    """Print the cards' division as a configuration file of mig-parted, called `current`."""
    targets = {card.index: _current(card) for card in _cards()}
    print(mig_parted.encode("current", targets), end="")


def check(file: FileOption, config: ConfigOption) -> None:
    """Exit with 1 unless every card is as the configuration says."""
    cards = _cards()
    wanted = _targets(file, config, cards)
    for card in cards:
        if card.index not in wanted:
            raise UserError(f"card {card.index} ({card.model}) is not in configuration {config}")
        current, target = _current(card), wanted[card.index]
        if current != target:
            raise UserError(
                f"card {card.index} is {_target_text(current)}, and configuration {config} wants "
                f"{_target_text(target)}: `fenka mig apply` changes it"
            )


def apply(
    file: FileOption,
    config: ConfigOption,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="print the steps, and what each waits for")
    ] = False,
) -> None:
    """Divide cards as far as nobody uses them. Exit with 75 if the daemon does the rest later."""
    cards = _cards()
    wanted = _targets(file, config, cards)
    uuids = {card.index: card.uuid for card in cards}
    targets = {uuids[index]: target for index, target in wanted.items()}
    with DaemonConnection(paths.current()) as connection:
        answer = connection.request(protocol.ApplyLayout(targets, dry_run), protocol.LayoutApplied)
    lines = answer.done or ([] if answer.waiting else ["nothing changes"])
    tables.print_lines([*lines, *(f"waits: {line}" for line in answer.waiting)])
    if answer.waiting and not dry_run:
        raise UserError(
            f"{len(answer.waiting)} steps wait, and are done by themselves when what they name has ended: "
            "`fenka mig list` shows them, `fenka mig cancel` gives them up",
            TEMPORARY_FAILURE,
        )


def cancel() -> None:
    """Give up the pending steps of layouts. Finished steps stay."""
    with DaemonConnection(paths.current()) as connection:
        answer = connection.request(protocol.CancelLayout(), protocol.LayoutApplied)
    tables.print_lines([f"given up: {line}" for line in answer.waiting] or ["nothing waits"])


def _cards() -> list[MigCardView]:
    with DaemonConnection(paths.current()) as connection:
        return connection.request(protocol.GetInstances(), protocol.InstancesListed).cards


def _targets(file: Path, config: str, cards: list[MigCardView]) -> dict[int, mig_parted.CardTarget]:
    try:
        entries = mig_parted.decode(read_input(file), config)
        return mig_parted.targets(entries, {card.index: card.pci_device for card in cards})
    except mig_parted.InvalidFile as why:
        raise UserError(f"{file}: {why}", INVALID_INPUT) from None


def read_input(file: Path) -> bytes:
    """Return a file's content. Raises UserError."""
    try:
        with file.open("rb") as stream:
            data = stream.read(MAX_BYTES + 1)
    except OSError as why:
        raise UserError(f"cannot read {file}: {why.strerror}", INVALID_INPUT) from None
    if len(data) > MAX_BYTES:
        raise UserError(f"{file} has more than {MAX_BYTES} bytes: name another file", INVALID_INPUT)
    return data


def _current(card: MigCardView) -> mig_parted.CardTarget:
    return mig_parted.CardTarget(
        card.enabled, Counter(instance.profile for instance in card.instances)
    )


def _target_text(target: mig_parted.CardTarget) -> str:
    if not target.enabled:
        return "a whole card"
    listed = ", ".join(f"{count}×{name}" for name, count in sorted(target.counts.items()))
    return f"divided into {listed or 'nothing'}"


register(
    app, list_instances, "Show the instances of this machine's or cluster's cards.", name="list"
)
register(app, export, "Print the division of this machine's cards as mig-parted's file.")
register(app, check, "Check that the cards are divided as a configuration says.", name="assert")
register(app, apply, "Divide the cards as a configuration says.")
register(app, cancel, "Give up what waits of the layouts that were applied.")
