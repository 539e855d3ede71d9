"""`fenka top --watch`: cards, programs and the queue, live in a terminal.

It shows the same values as the dashboard's page. A value that is not known is `–`.
"""

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Iterator
from functools import partial
from typing import ClassVar, Literal

from rich.style import Style
from rich.text import Text
from textual.app import App, ComposeResult
from textual.binding import BindingType
from textual.containers import VerticalScroll
from textual.widgets import DataTable, Footer, Input, Static

from fenka.cli.common_options import Target, short_duration
from fenka.cli.tables import escape
from fenka.dashboard.cluster_live import ClusterLive
from fenka.dashboard.live import Live
from fenka.dashboard.loss_curves import LossReaders
from fenka.dashboard.surroundings import look_around
from fenka.kubernetes.api_client import Api
from fenka.local.machine_board import Viewer
from fenka.views.board import CardTile, ProgramLine, SliceTile, WaitingLine, World
from fenka.workstation import paths

Source = Callable[[], AsyncIterator[World]]
"""Yields what to show, each time that it changes."""

UNKNOWN = "–"

SMALL_LINES = 12
"""A terminal with fewer lines shows cards and programs only; the first line has the number that waits."""

USED, HELD, FREE = "█", "░", " "
"""Of a slice's bar: memory in use, memory that is held and not used, memory that nobody holds."""

SortKey = Literal["card", "memory", "busy", "idle", "user"]

_SLICE_STYLES = tuple(
    Style(color=color) for color in ("cyan", "green", "yellow", "magenta", "blue")
)
_QUIET = Style(dim=True)
_LOUD = Style(bold=True, color="red")

_ORDERS: dict[SortKey, Callable[[ProgramLine], tuple[object, ...]]] = {
    "card": lambda line: (line.cards, line.name),
    "memory": lambda line: (-line.held_mib, line.name),
    "busy": lambda line: (-(line.busy or 0), line.name),
    "idle": lambda line: (-(line.idle_s or 0), line.name),
    "user": lambda line: (line.user, line.name),
}


def percent(share: float | None) -> str:
    """Return a share as percent; a dash if it is not known."""
    return UNKNOWN if share is None else f"{share:.0%}".replace("%", " %")


def _number(value: float | None, unit: str) -> str:
    return UNKNOWN if value is None else f"{value:.0f} {unit}"


def card_title(card: CardTile) -> Text:
    """Return a card's figures in one line."""
    power = _number(card.power_w, "W")
    if card.power_limit_w is not None and card.power_w is not None:
        power = f"{card.power_w:.0f} of {card.power_limit_w:.0f} W"
    used = UNKNOWN if card.used_mib is None else str(card.used_mib)
    title = Text.assemble(
        (f"{card.id:>3}  {escape(card.model)}", Style(bold=True)),
        f"  held {card.units - card.free_units}/{card.units}"
        f"  used {used} of {card.memory_mib} MiB  busy {percent(card.busy)}"
        f"  {_number(card.temperature_c, '°C')}  {power}",
    )
    if card.note:
        title.append(f"  {escape(card.note)}", _QUIET if card.healthy else _LOUD)
    return title


def card_bar(card: CardTile, width: int) -> Text:
    """Return a card as one bar: each slice as wide as its share of the memory, full as far as it is used."""
    bar, inner = Text("    ▕"), max(width - 6, 10)
    taken = at = 0
    for number, piece in enumerate(card.slices):
        taken += piece.held_mib
        end = min(round(inner * taken / card.memory_mib), inner) if card.memory_mib else at
        bar.append(_slice_bar(piece, end - at), _SLICE_STYLES[number % len(_SLICE_STYLES)])
        at = max(end, at)
    return bar.append(FREE * (inner - at)).append("▏")


def _slice_bar(piece: SliceTile, width: int) -> str:
    if width < 1:
        return ""
    inner = width - 1  # A gap between two slices tells them apart without colours.
    used = 0 if piece.used_mib is None else round(inner * piece.used_mib / max(piece.held_mib, 1))
    used = min(used, inner)
    return USED * used + HELD * (inner - used) + FREE


def card_names(card: CardTile, width: int) -> Text:
    """Return the names below a card's bar, each below its slice."""
    line, inner = Text("     "), max(width - 6, 10)
    taken = at = 0
    for number, piece in enumerate(card.slices):
        taken += piece.held_mib
        end = min(round(inner * taken / card.memory_mib), inner) if card.memory_mib else at
        room = max(end - at, 0)
        name = escape(piece.name)
        name = name if len(name) < room else name[: max(room - 2, 0)] + "…" * (room > 1)
        line.append(name.ljust(room)[:room], _SLICE_STYLES[number % len(_SLICE_STYLES)])
        at = max(end, at)
    return line


def cards_text(world: World, width: int, height: int) -> Text:
    """Return all cards; of many nodes the sums.

    Args:
        world: What is shown.
        width: Cells of a line.
        height: Lines of the terminal. If bars do not fit into half of them, each card has its title only.
    """
    lines, titles = list[Text](), list[Text]()
    for card in world.cards:
        titles.append(card_title(card))
        lines += [titles[-1], card_bar(card, width)]
        lines += [card_names(card, width)] if card.slices else []
        if card.unleased:
            lines.append(Text(f"     {escape(card.unleased)}", _QUIET))
    if len(lines) > height // 2:
        lines = titles
    if not world.cards:
        lines.append(
            Text(f"{sum(node.cards for node in world.nodes)} cards on {len(world.nodes)} nodes")
        )
    return Text("\n").join(lines)


def summary(world: World) -> Text:
    """Return the first line: where this is, what is free, and what is not known now."""
    line = Text.assemble((escape(world.name), Style(bold=True)))
    if world.simulated:
        line.append("  simulated cards")
    line.append(
        f"  free {world.free_mib} MiB, largest slice that starts {world.largest_mib} MiB"
        f"  {world.waiting_total} waiting"
    )
    for problem in world.problems:
        line.append(f"\n{escape(problem)}", _LOUD)
    return line


def waiting_text(world: World) -> Text:
    """Return the requests that wait, with the reason of each and what helps."""
    lines = [line for waiting in world.waiting for line in _waiting_lines(waiting, world.at)]
    more = world.waiting_total - len(world.waiting)
    lines += [Text(f"and {more} more", _QUIET)] if more > 0 else []
    return Text("\n").join(lines) if lines else Text("Nobody waits.", _QUIET)


def _waiting_lines(line: WaitingLine, now: float) -> Iterator[Text]:
    yield Text.assemble(
        f"{line.position:>3}  ",
        (escape(line.name), Style(bold=True)),
        f"  {escape(line.user)}  asks {escape(line.asks)}  since {short_duration(now - line.since)}",
    )
    yield Text(f"     {escape(line.why)}", _QUIET)
    if line.helps:
        yield Text(f"     helps: {escape('; '.join(line.helps))}", _QUIET)


COLUMNS = ("NAME", "USER", "KIND", "CARD", "HELD", "USED", "BUSY", "CORE", "IDLE", "AGE")


def program_cells(line: ProgramLine, now: float) -> tuple[str, ...]:
    """Return a program's cells, in the order of COLUMNS."""
    core = "–" if not line.compute else f"{line.compute} {line.compute_mode}"
    started = line.started_at
    return (
        escape(line.name) + (" !" if line.violations else ""),
        escape(line.user),
        line.kind,
        ",".join(line.cards),
        str(line.held_mib),
        UNKNOWN if line.used_mib is None else str(line.used_mib),
        percent(line.busy),
        core,
        "" if line.idle_s is None else short_duration(line.idle_s),
        line.state if started is None else short_duration(now - started),
    )


class TopScreen(App[None]):
    """The screen. follow: yields what to show, each time that it changes."""

    CSS = """
    #summary, #cards, #waiting { height: auto; padding: 0 1; }
    #card-lines { text-wrap: nowrap; text-overflow: ellipsis; }
    #cards { max-height: 50%; min-height: 1; scrollbar-size-vertical: 1; scrollbar-gutter: stable; }
    #waiting { max-height: 30%; border-top: solid $panel; }
    DataTable { height: 1fr; }
    Input { display: none; }
    Input.shown { display: block; }
    """
    ENABLE_COMMAND_PALETTE = False
    BINDINGS: ClassVar[list[BindingType]] = [
        ("q", "quit", "quit"),
        ("c", "order('card')", "by card"),
        ("m", "order('memory')", "by memory"),
        ("b", "order('busy')", "by busy"),
        ("i", "order('idle')", "by idle"),
        ("u", "order('user')", "by user"),
        ("o", "own", "only mine"),
        ("slash", "filter", "filter"),
    ]

    def __init__(self, follow: Source) -> None:
        super().__init__()
        self._follow = follow
        self._world: World | None = None
        self._order: SortKey = "card"
        self._own, self._filter = False, ""

    def compose(self) -> ComposeResult:
        """Return the parts of the screen, from top to bottom."""
        yield Static("reading…", id="summary")
        with VerticalScroll(id="cards"):
            yield Static(id="card-lines")
        table = DataTable[str](cursor_type="row")
        table.add_columns(*COLUMNS)
        yield table
        yield Input(placeholder="part of a name or a user; Enter: done, Esc: all", id="filter")
        with VerticalScroll(id="waiting"):
            yield Static(id="waiting-lines")
        yield Footer()

    def on_mount(self) -> None:
        """Begin to follow."""
        self.query_one(DataTable).focus()
        self.run_worker(self._read(), exclusive=True)

    async def _read(self) -> None:
        async for world in self._follow():
            self._world = world
            self.show()

    def show(self) -> None:
        """Draw what is known."""
        if (world := self._world) is None:
            return
        # Without the padding and the place of the scroll bar.
        width, height = self.size.width - 3, self.size.height
        small = height < SMALL_LINES
        self.query_one("#waiting").display = self.query_one(Footer).display = not small
        self.query_one("#summary", Static).update(summary(world))
        self.query_one("#card-lines", Static).update(cards_text(world, width, height))
        self.query_one("#waiting-lines", Static).update(waiting_text(world))
        table = self.query_one(DataTable)
        row = table.cursor_row
        table.clear()
        for line in self.programs():
            table.add_row(*program_cells(line, world.at))
        table.move_cursor(row=row)

    def programs(self) -> list[ProgramLine]:
        """Return the programs that are shown, in order."""
        lines = self._world.programs if self._world else []
        wanted = self._filter.lower()
        chosen = [
            line
            for line in lines
            if (line.own or not self._own) and wanted in f"{line.name} {line.user}".lower()
        ]
        return sorted(chosen, key=_ORDERS[self._order])

    def on_resize(self) -> None:
        """Draw the bars as wide as the terminal is now: the app has the former size until the event ends."""
        self.call_after_refresh(self.show)

    def action_order(self, key: SortKey) -> None:
        """Sort the programs."""
        self._order = key
        self.show()

    def action_own(self) -> None:
        """Show only the user's own programs, or all again."""
        self._own = not self._own
        self.show()

    def action_filter(self) -> None:
        """Ask for a part of a name."""
        field = self.query_one(Input)
        field.add_class("shown")
        field.focus()

    def on_input_changed(self, event: Input.Changed) -> None:
        """Filter while the user types."""
        self._filter = event.value
        self.show()

    def on_input_submitted(self) -> None:
        """Keep the filter, and go back to the table."""
        self.query_one(Input).remove_class("shown")
        self.query_one(DataTable).focus()

    def key_escape(self) -> None:
        """Show all programs again."""
        self.query_one(Input).value = ""
        self.on_input_submitted()


PERIOD_S = 1.0
"""Between two looks for what has changed."""


async def _worlds(live: Live | ClusterLive) -> AsyncIterator[World]:
    """Yield what is known, as long as somebody looks."""
    following = asyncio.create_task(live.run())
    try:
        shown = None
        while True:
            if following.done():
                following.result()
            world = live.world()
            if world is not None and world != shown:
                yield world
            shown = world
            await asyncio.sleep(PERIOD_S)
    finally:
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)


def watch_machine() -> None:
    """Show this machine until the user ends it."""

    def follow() -> AsyncIterator[World]:
        look = partial(look_around, losses=LossReaders())
        return _worlds(Live(paths.current(), Viewer(os.geteuid()), look))

    TopScreen(follow).run()


def watch_cluster(target: Target) -> None:
    """Show a cluster until the user ends it. Raises UserError."""

    async def follow() -> AsyncIterator[World]:
        async with await Api.connect(target.kubeconfig, target.context) as api:
            async for world in _worlds(ClusterLive(api, api.server)):
                yield world

    TopScreen(follow).run()
