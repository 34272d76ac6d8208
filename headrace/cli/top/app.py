"""The live view of `headrace top`: screens, keys, and what feeds them. `state` has the content.

Without colour nothing is lost: bars are letters, and the row that is chosen is reversed.
"""

import asyncio
import contextlib
import time
from collections.abc import Callable, Sequence
from typing import ClassVar

from rich.text import Text
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.screen import ModalScreen, Screen
from textual.widgets import DataTable, Footer, Input, Static

from headrace.cli import explaining
from headrace.cli.top.state import COLUMNS, SORTS, USES, View, bar
from headrace.client import HeadraceClient
from headrace.service.errors import ServiceError

_HISTORY_S = 60.0
_RETRY_S = 1.0
_MAX_QUEUE = 200
# What the columns before a bar take of a line.
_STEP_WIDTH = 31
_TENANT_COLUMNS = ("TENANT", "REQUESTS", "TOKENS")
_REQUEST_COLUMNS = ("REQUEST", "TENANT", "TOKENS", "WAITS s", "AT", "FOR")
_ROW_COLUMNS = ("REQUEST", "KIND", "TOKENS", "DRAFTS", "COMPUTED BEFORE")

_STYLE = """
Screen, ModalScreen { background: ansi_default; color: ansi_default; }
Static, VerticalScroll { background: ansi_default; color: ansi_default; height: auto; }
VerticalScroll { height: 1fr; }
DataTable { background: ansi_default; color: ansi_default; height: auto; max-height: 60%; }
DataTable > .datatable--header { background: ansi_default; color: ansi_default; text-style: bold; }
DataTable > .datatable--cursor { background: ansi_default; color: ansi_default; }
DataTable:focus > .datatable--cursor {
    background: ansi_default; color: ansi_default; text-style: reverse;
}
DataTable.queue { height: 1fr; max-height: 100%; }
.title { text-style: bold; }
#ask { dock: bottom; height: 3; width: 100%; }
"""
_LEGEND = ", ".join(f"{letter} {use}" for letter, use in USES)


async def watch(open_client: Callable[[], HeadraceClient], interval_s: float) -> None:
    """Show the view until the user leaves.

    Raises:
        ServiceError: the first answer is an error.
    """
    async with open_client() as client:
        view = View()
        view.take_pool(await client.pool(), time.monotonic())
        await TopApp(client, view, interval_s).run_async()


class TopApp(App[None]):
    """Asks the router, and lets the screen on top show what came."""

    CSS = _STYLE
    ENABLE_COMMAND_PALETTE = False
    TITLE = "headrace top"
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("q", "quit", "quit"),
        Binding("e", "ask", "explain"),
        Binding("p", "pause", "pause"),
        Binding("ctrl+c", "quit", "quit", show=False),
    ]

    def __init__(self, client: HeadraceClient, view: View, interval_s: float) -> None:
        super().__init__(ansi_color=True)
        self.client = client
        self.view = view
        self.is_still = False
        self.trouble = ""
        self._interval_s = interval_s

    def on_mount(self) -> None:
        """Begin to ask."""
        self.push_screen(PoolScreen())
        self.run_worker(self._watch_steps(), exit_on_error=True)
        self.run_worker(self._ask_again_and_again(), exit_on_error=True)

    async def _ask_again_and_again(self) -> None:
        while True:
            try:
                pool = await self.client.pool()
                if not self.is_still:
                    self.view.take_pool(pool, time.monotonic())
                # Behind the pool: a router of the version before has no list of the queue.
                page = await self.client.queue(limit=_MAX_QUEUE)
                if not self.is_still:
                    self.view.queue, self.view.num_waiting = page.requests, page.num_waiting
                self.trouble = ""
            except ServiceError as error:
                self.trouble = f"{error.message}; trying again"
            await self._show()
            await asyncio.sleep(self._interval_s)

    async def _watch_steps(self) -> None:
        while True:
            with contextlib.suppress(ServiceError):  # the other task says what is wrong
                after = self.view.last_position()
                async for workers in self.client.watch_steps(after=after, history_s=_HISTORY_S):
                    if not self.is_still:
                        self.view.take_steps(workers, time.monotonic())
            await asyncio.sleep(_RETRY_S)

    async def _show(self) -> None:
        screen = self.screen
        if isinstance(screen, PictureScreen) and screen.is_mounted and not self.is_still:
            await screen.show()

    async def action_pause(self) -> None:
        """Let the picture stand, or go on."""
        self.is_still = not self.is_still
        if isinstance(self.screen, PictureScreen):
            await self.screen.show()

    @property
    def note(self) -> str:
        """What the title says of the picture; empty while all is well."""
        return "stands still: p goes on" if self.is_still else self.trouble

    def action_ask(self) -> None:
        """Ask for a request's id, and show the request."""
        self.push_screen(AskScreen(), self.look_into_request)

    def look_into_request(self, request_id: str | None) -> None:
        """Show a request."""
        if request_id:
            self.push_screen(RequestScreen(request_id))


class PictureScreen(Screen[None]):
    """A screen that shows the view again after each answer."""

    async def show(self) -> None:
        """Draw what is known now."""
        raise NotImplementedError

    @property
    def top(self) -> TopApp:
        """The application."""
        assert isinstance(self.app, TopApp), "these screens are the application's"
        return self.app

    async def on_screen_resume(self) -> None:
        """The screen is on top, for the first time or again."""
        await self.show()

    async def on_resize(self) -> None:
        """The terminal has another size."""
        await self.show()


class PoolScreen(PictureScreen):
    """The workers, and the queue by tenant or by request."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("s", "sort", "sort"),
        Binding("r", "reverse", "reverse"),
        Binding("v", "turn", "tenants/requests"),
    ]

    def __init__(self) -> None:
        super().__init__()
        self._sort = 0
        self._is_reversed = False
        self._shows_requests = False

    def compose(self) -> ComposeResult:
        """Title, workers, queue."""
        yield Static(id="title", classes="title", markup=False)
        yield Static(id="summary", markup=False)
        yield DataTable(id="workers", cursor_type="row")
        yield Static(id="queue-title", classes="title", markup=False)
        yield DataTable(id="queue", classes="queue", cursor_type="row")
        yield Footer()

    async def show(self) -> None:
        """Draw what is known now."""
        view, sort = self.top.view, SORTS[self._sort]
        order = f"by {sort}{' reversed' if self._is_reversed else ''}"
        note = self.top.note
        self.query_one("#title", Static).update(f"headrace top  {note or order}  ({_LEGEND})")
        self.query_one("#summary", Static).update(view.summary())
        rows = view.workers(sort, is_reversed=self._is_reversed, width=self.size.width)
        _fill(self.query_one("#workers", DataTable), COLUMNS, rows)
        queue = self.query_one("#queue", DataTable)
        if self._shows_requests:
            title = f"{view.num_waiting} wait, in the router and at workers"
            _fill(queue, _REQUEST_COLUMNS, view.requests())
        else:
            title = "the router's queue by tenant"
            _fill(queue, _TENANT_COLUMNS, view.tenants())
        self.query_one("#queue-title", Static).update(title)

    async def action_sort(self) -> None:
        """Sort by the next column."""
        self._sort = (self._sort + 1) % len(SORTS)
        await self.show()

    async def action_reverse(self) -> None:
        """Turn the order around."""
        self._is_reversed = not self._is_reversed
        await self.show()

    async def action_turn(self) -> None:
        """Show requests instead of tenants, or tenants again."""
        self._shows_requests = not self._shows_requests
        await self.show()

    def on_data_table_row_selected(self, event: DataTable.RowSelected) -> None:
        """Look into a worker or a request."""
        name = str(event.data_table.get_row(event.row_key)[0])
        if event.data_table.id == "workers":
            self.app.push_screen(WorkerScreen(name))
        elif self._shows_requests:
            self.top.look_into_request(name)


class WorkerScreen(PictureScreen):
    """A worker: its last steps as bars, and the requests of the last one."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape", "app.pop_screen", "back")]

    def __init__(self, worker_id: str) -> None:
        super().__init__()
        self._worker_id = worker_id
        self._position = 0

    def compose(self) -> ComposeResult:
        """Title, bars, requests."""
        yield Static(id="title", classes="title", markup=False)
        yield Static(id="steps", markup=False)
        yield DataTable(id="rows", classes="queue", cursor_type="row")
        yield Footer()

    async def show(self) -> None:
        """Draw what is known now."""
        steps = list(self.top.view.steps_of(self._worker_id))
        title = f"{self._worker_id}  {self.top.note}  ({_LEGEND})"
        self.query_one("#title", Static).update(title)
        num_lines = max(1, self.size.height // 2 - 3)
        width = max(len(USES), self.size.width - _STEP_WIDTH)
        lines = [f"{'STEP':>10} {'ms':>7} {'RUN':>4} {'WAIT':>5}  BUDGET"]
        for step in steps[-num_lines:]:
            num_waiting = sum(step.num_waiting_by_reason.values())
            lines.append(
                f"{step.step_id:>10} {step.duration_s * 1000:>7.1f} {step.num_running:>4}"
                f" {num_waiting:>5}  {bar([step], width)}"
            )
        self.query_one("#steps", Static).update("\n".join(lines))
        if steps and steps[-1].position != self._position:
            self._position = steps[-1].position
            await self._show_requests()

    async def _show_requests(self) -> None:
        try:
            batch = await self.top.client.step_batch(self._worker_id, self._position)
        except ServiceError:
            return  # the step is no longer kept, or the router is away
        if not self.is_current:
            return  # left meanwhile
        rows = [
            (
                *(row.request_id, row.kind.replace("_", " "), str(row.num_tokens)),
                *(str(row.num_drafts), str(row.num_computed_tokens)),
            )
            for row in batch.rows
        ]
        _fill(self.query_one("#rows", DataTable), _ROW_COLUMNS, rows)

    def on_data_table_row_selected(self, event: DataTable.RowSelected) -> None:
        """Look into a request."""
        self.top.look_into_request(str(event.data_table.get_row(event.row_key)[0]))


class RequestScreen(PictureScreen):
    """A request's timeline, and where its time goes."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape", "app.pop_screen", "back")]

    def __init__(self, request_id: str) -> None:
        super().__init__()
        self._request_id = request_id

    def compose(self) -> ComposeResult:
        """Title, and lines that scroll."""
        yield Static(f"request {self._request_id}", classes="title", markup=False)
        with VerticalScroll():
            yield Static(id="history", markup=False)
        yield Footer()

    async def show(self) -> None:
        """Ask for the request's history, and show it."""
        try:
            # Of several completions the first is explained, under the request's id.
            history = await self.top.client.explain(self._request_id.partition("#")[0])
            text = "\n".join([*explaining.time_spent(history), "", *explaining.timeline(history)])
        except ServiceError as error:
            text = error.message
        if self.is_current:  # not left meanwhile
            self.query_one("#history", Static).update(text)


class AskScreen(ModalScreen[str]):
    """Asks for a request's id."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape", "app.pop_screen", "back")]

    def compose(self) -> ComposeResult:
        """One line."""
        yield Input(placeholder="id of a request", id="ask")

    def on_input_submitted(self, event: Input.Submitted) -> None:
        """Leave with the id."""
        self.dismiss(event.value.strip())


def _fill(table: "DataTable[Text]", columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Show rows in a table; the cursor stays with its row, by the first cell, if that is there."""
    labels = [str(column.label) for column in table.ordered_columns]
    chosen = ""
    if table.row_count and labels == list(columns):
        chosen = str(table.get_row_at(table.cursor_row)[0])
    table.clear(columns=labels != list(columns))
    if labels != list(columns):
        table.add_columns(*columns)
    for row in rows:
        # Not as markup: names of tenants may hold brackets.
        table.add_row(*map(Text, row))
    names = [row[0] for row in rows]
    if chosen in names:
        table.move_cursor(row=names.index(chosen), animate=False)
