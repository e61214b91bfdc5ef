"""The frames of `rekindle top`: a snapshot, and the rates since the one before. Pure functions."""

from collections.abc import Iterator, Sequence

from rich.console import Group, RenderableType
from rich.filesize import decimal
from rich.table import Table
from rich.text import Text

from rekindle.cli.plain import plain_table, span
from rekindle.cli.top.snapshot import SHARED, ServerSnapshot, SlotView, Tokens

WIDE_COLUMNS = 120  # width for tables side by side; picked
# Both are picked to fit a terminal of 24 lines.
_MOST_SLOTS = 16
_MOST_SESSIONS = 10
_BAR_CELLS = 20
_TOKEN_STYLES = {"prefilled": "yellow", "generated": ""}  # others are cached: green
_NAME_CELLS = 20  # picked to fit every table into 80 columns


def frame(
    url: str, snapshot: ServerSnapshot, rates: Tokens | None, *, width: int
) -> RenderableType:
    counts, tiers = _tokens(snapshot, rates), _tiers(snapshot)
    slots, sessions = _slots(snapshot.slots), _sessions(snapshot)
    if width < WIDE_COLUMNS:
        rows: list[RenderableType] = [counts, tiers, slots, sessions]
    else:
        rows = [_beside(counts, tiers), _beside(slots, sessions)]
    apart = [part for row in rows for part in (Text(), row)]
    return Group(_head(url, snapshot), _load(snapshot), *apart)


def _head(url: str, snapshot: ServerSnapshot) -> Text:
    version = f" {snapshot.version}" if snapshot.version else ""
    parts = [f"rekindle{version}", snapshot.model or "no model is loaded", url]
    if snapshot.uptime_seconds is not None:
        parts.append(f"up {span(snapshot.uptime_seconds)}")
    return Text("  ".join(parts), style="bold", overflow="ellipsis", no_wrap=True)


def _load(snapshot: ServerSnapshot) -> Text:
    line = Text(no_wrap=True, overflow="ellipsis")
    line.append(f"slots {snapshot.n_busy}/{snapshot.n_slots}  ")
    line.append(f"waiting {snapshot.n_waiting}  ", style="yellow" if snapshot.n_waiting else "")
    line.append(f"cells {snapshot.n_cells_used}/{snapshot.n_cells} ")
    line.append(_bar(snapshot.n_cells_used, snapshot.n_cells))
    return line


def _tokens(snapshot: ServerSnapshot, rates: Tokens | None) -> Table:
    tokens = snapshot.tokens
    rows = [("from the context", "live"), ("from memory", "memory"), ("from disk", "disk")]
    if snapshot.is_shared_store_up is not None or tokens.shared:
        rows.append(("from shared store", "shared"))
    if tokens.upstream:
        rows.append(("from upstream", "upstream"))
    rows += [("prefilled", "prefilled"), ("generated", "generated")]
    table = _table("prompt tokens", "total", "per second")
    for label, name in rows:
        rate = f"{getattr(rates, name):,.0f}" if rates else "-"
        style = _TOKEN_STYLES.get(name, "green")
        table.add_row(Text(label, style=style), f"{getattr(tokens, name):,}", rate)
    now = rates.hit_share if rates else None
    table.add_row("hit share", _share(tokens.hit_share), _share(now))
    return table


def _tiers(snapshot: ServerSnapshot) -> Table:
    table = _table("tier", "used", "budget", "entries")
    table.add_column("")
    for tier in snapshot.tiers:
        used, budget = decimal(tier.n_bytes), decimal(tier.budget_bytes)
        state = _bar(tier.n_bytes, tier.budget_bytes)
        if tier.name == SHARED:  # entries of other servers are not known here
            used = budget = "-"
            is_up = snapshot.is_shared_store_up
            state = Text("ok" if is_up else "not answering", style="green" if is_up else "red")
        table.add_row(tier.name, used, budget, f"{tier.n_entries:,}", state)
    return table


def _slots(slots: Sequence[SlotView]) -> RenderableType:
    table = _table("slot", "rows", "prompt", "reply")
    for heading in ("state", "class", "session"):
        table.add_column(heading, no_wrap=True)
    for slot in slots[:_MOST_SLOTS]:
        table.add_row(
            str(slot.id),
            _amount(slot.n_rows),
            _amount(slot.n_prompt),
            _amount(slot.n_decoded),
            Text("busy", style="green") if slot.is_processing else Text("idle", style="dim"),
            slot.rank,
            _short(slot.session),
        )
    return Group(table, *_more(len(slots) - _MOST_SLOTS, "slots"))


def _sessions(snapshot: ServerSnapshot) -> RenderableType:
    table = _table("session", "requests", "prompt", "hit", "prefilled", "twice", "idle")
    for session in snapshot.sessions[:_MOST_SESSIONS]:
        n_twice = session.n_prefilled_twice
        table.add_row(
            _short(session.name),
            _amount(session.n_requests),
            _amount(session.n_prompt),
            f"{session.n_cached / session.n_prompt:.0%}" if session.n_prompt else "-",
            _amount(session.n_prefilled),
            Text(_amount(n_twice), style="yellow" if n_twice else ""),
            span(max(snapshot.taken_at - session.last_used, 0)),
        )
    return Group(table, *_more(len(snapshot.sessions) - _MOST_SESSIONS, "sessions"))


def _amount(number: int) -> str:
    """Return the number in five characters at most."""
    if number < 10_000:
        return str(number)
    for unit, size in (("k", 10**3), ("M", 10**6)):
        if number < 1000 * size:
            return f"{number / size:.4g}"[:4].rstrip(".") + unit
    return f"{number / 10**9:.4g}"[:4].rstrip(".") + "G"


def _short(name: str) -> Text:
    fits = len(name) <= _NAME_CELLS
    return Text(name if fits else f"{name[: _NAME_CELLS - 3]}...", overflow="crop")


def _more(number: int, what: str) -> Iterator[Text]:
    if number > 0:
        yield Text(f"and {number} {what} more", style="dim")


def _table(first: str, *numbers: str) -> Table:
    table = plain_table()
    table.add_column(first, no_wrap=True)
    for heading in numbers:
        table.add_column(heading, justify="right", no_wrap=True)
    return table


def _beside(left: RenderableType, right: RenderableType) -> Table:
    grid = Table.grid(padding=(0, 4, 0, 0))
    grid.add_row(left, right)
    return grid


def _bar(used: int, limit: int) -> Text:
    share = min(used / limit, 1.0) if limit else 0.0
    n_full = round(share * _BAR_CELLS)
    bar = Text("[" + "#" * n_full + "-" * (_BAR_CELLS - n_full) + "]")
    bar.append(f" {share:4.0%}")
    return bar


def _share(share: float | None) -> str:
    return "-" if share is None else f"{share:.1%}"
