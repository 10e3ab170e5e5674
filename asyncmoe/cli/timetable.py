"""Where the ranks' time went, as a table: from two reports of every rank's counters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Report = Mapping[str, Any]  # the counters of one rank by name

_KINDS = ("attention", "expert", "head")


def time_table(before: Mapping[int, Report], after: Mapping[int, Report]) -> str:
    """One column per rank that is in both. Compute runs beside the loop: each adds up to 100 %."""
    ranks = sorted(set(before) & set(after))
    columns = [_column(before[rank], after[rank]) for rank in ranks]
    rows = [["", *(f"rank {rank}" for rank in ranks)]]
    names = columns[0] if columns else ()
    rows += [[name, *(column[name] for column in columns)] for name in names]
    widths = [max(map(len, cells)) for cells in zip(*rows, strict=True)]
    return "\n".join(_line(row, widths) for row in rows)


def _line(row: list[str], widths: list[int]) -> str:
    name, *cells = (f"{cell:>{width}}" for cell, width in zip(row, widths, strict=True))
    return "  ".join([row[0].ljust(len(name)), *cells])


def _column(before: Report, after: Report) -> dict[str, str]:
    """The cells of one rank, by the name of their row."""
    spent = {key: after[key] - before[key] for key in after if key in before}
    whole_s = max(spent["loop_s"], 1e-9)

    def share(seconds: float) -> str:
        return f"{seconds * 1e3:.0f} ms {seconds / whole_s:4.0%}"

    compute = {kind: spent[f"{kind}_compute_s"] for kind in _KINDS}
    prepare_s = sum(spent[f"{kind}_prepare_s"] for kind in _KINDS)
    finish_s = sum(spent[f"{kind}_finish_s"] for kind in _KINDS)
    receive_s = spent["receive_s"]
    cells = {f"compute: {kind}": share(seconds) for kind, seconds in compute.items()}
    cells["compute: waiting for rows"] = share(whole_s - sum(compute.values()))
    cells["loop: choose and prepare batches"] = share(prepare_s)
    cells["loop: route rows and post parcels"] = share(finish_s)
    cells["loop: take parcels in"] = share(receive_s)
    cells["loop: network, front end, idle"] = share(whole_s - prepare_s - finish_s - receive_s)
    for kind in _KINDS:
        batches, rows = spent[f"{kind}_batches"], spent[f"{kind}_rows"]
        cells[f"{kind} batches x mean rows"] = f"{batches} x {rows / max(batches, 1):.1f}"
    cells["parcels sent"] = str(spent["sent_parcels"])
    cells["bytes sent"] = f"{spent['sent_bytes'] / 1e6:.2f} MB"
    return cells
