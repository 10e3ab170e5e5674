"""Where the ranks' time went, as a table."""

from __future__ import annotations

from collections.abc import Mapping

from asyncmoe.metrics.account import KINDS, Account


def time_table(of_ranks: Mapping[int, Account], steps: float | None = None) -> str:
    """One column per rank. Times are of it all, or with `steps` of one step."""
    columns = [_column(account, steps) for account in of_ranks.values()]
    rows = [["", *(f"rank {rank}" for rank in of_ranks)]]
    names = columns[0] if columns else ()
    rows += [[name, *(column[name] for column in columns)] for name in names]
    widths = [max(map(len, cells)) for cells in zip(*rows, strict=True)]
    return "\n".join(_line(row, widths) for row in rows)


def _line(row: list[str], widths: list[int]) -> str:
    name, *cells = (f"{cell:>{width}}" for cell, width in zip(row, widths, strict=True))
    return "  ".join([row[0].ljust(len(name)), *cells])


def _column(account: Account, steps: float | None) -> dict[str, str]:
    """The cells of one rank, by the name of their row."""

    def cell(seconds: float) -> str:
        ms = 1e3 * seconds
        amount = f"{ms:.0f} ms" if steps is None else f"{ms / steps:.2f} ms"
        return f"{amount} {seconds / account.whole_s:4.0%}"

    cells = {name: cell(seconds) for name, seconds in account.times_s().items()}
    cells["loop: hidden behind compute, at least"] = f"{account.hidden:.0%}"
    for kind in KINDS:
        batches, rows = account.batches[kind], account.rows[kind]
        cells[f"{kind} batches x mean rows"] = f"{batches} x {rows / max(batches, 1):.1f}"
    cells["parcels sent"] = str(account.parcels)
    cells["bytes sent"] = f"{account.sent_bytes / 1e6:.2f} MB"
    return cells
