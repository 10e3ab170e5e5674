"""The charts of a report, each an HTML figure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape

import numpy as np

from asyncmoe.report.axis import Axis, linear, logarithmic, short
from asyncmoe.report.picture import opacity_picture
from asyncmoe.report.results import Results, Run
from asyncmoe.report.svg import COLOURS, Chart, colour

# Of queues by kind; the style sheet has the same colours, as a picture's pixels cannot ask it.
ATTENTION, EXPERT, HEAD = (37, 119, 214), (226, 108, 18), (20, 150, 110)
OF_KIND = {"attention": "var(--attention)", "expert": "var(--expert)", "head": "var(--head)"}
SMOOTH = 9  # bins of time that a point of a rate is the mean of


def throughput_against_itl(results: Results) -> str:
    """One point for each run, a line for each series of several."""
    points = [
        (run, run.metrics["all"]["itl_ms"]["mean"], run.metrics["tokens_per_s"])
        for run in results.runs
        if run.metrics["all"]["itl_ms"]
    ]
    if len(points) < 2:
        return ""
    chart = Chart(
        linear("mean time between tokens (ms)", [x for _, x, _ in points]),
        linear("tokens/s", [y for _, _, y in points]),
    )
    shades = series_colours(results.runs)
    for series, shade in shades.items():
        own = sorted((x, y) for run, x, y in points if run.series == series)
        if len(own) > 1:
            chart.line([x for x, _ in own], [y for _, y in own], shade)
    for run, x, y in points:
        chart.point(x, y, shades[run.series], f"{run.name}: {y:.0f} tokens/s, {x:.1f} ms")
    shown = {run.series for run, _, _ in points}
    named = {series: shade for series, shade in shades.items() if series in shown}
    return figure("Throughput against ITL", chart.svg("tokens per second by ITL"), legend(named))


def itl_distribution(results: Results) -> str:
    """How many of the gaps between tokens are at most so long.

    Of every run, or where those are too many of each series the one with the most tokens/s.
    """
    runs = [run for run in results.runs if run.metrics["itl_histogram"]]
    if not runs:
        return ""
    note = ""
    if len(runs) > COLOURS:
        fastest = {
            run.series: run for run in sorted(runs, key=lambda run: run.metrics["tokens_per_s"])
        }
        runs = [fastest[name] for name in series_colours(runs)]
        note = "<span>of each series the run with most tokens/s</span>"
    edges, upto = {}, {}
    for run in runs:
        histogram = run.metrics["itl_histogram"]
        edges[run.name] = histogram["edges_ms"]
        upto[run.name] = [0.0, *(100 * np.cumsum(histogram["share"])).tolist()]
    chart = Chart(
        logarithmic("time between tokens (ms)", [x for each in edges.values() for x in each]),
        linear("% of tokens within that time", [100.0]),
    )
    by_series = series_colours(results.runs)
    alike = len({run.series for run in runs}) < len(runs)
    shades = {
        run.name: colour(index) if alike else by_series[run.series]
        for index, run in enumerate(runs)
    }
    for name, shade in shades.items():
        chart.line(edges[name], upto[name], shade)
    return figure("ITL distribution", chart.svg("distribution of ITL"), legend(shades) + note)


def queue_depth(run: Run) -> str:
    """Rows that wait at each stage over time, attention and expert queues in two colours."""
    if "depth" not in run.cluster:
        return ""
    rows = np.array(run.cluster["depth"]["rows"], np.float64)
    times_s = run.cluster["depth"]["time_s"]
    stages = len(rows)
    kinds = [ATTENTION, EXPERT] * (stages // 2) + [HEAD]
    deepest = max(float(np.percentile(rows, 99.8)), 1.0)
    # By the root: otherwise one deep queue makes all others invisible.
    picture = opacity_picture(np.sqrt(rows / deepest), np.array(kinds, np.uint8))
    chart = Chart(
        Axis("time (s)", times_s[0], times_s[-1] + 1e-9),
        Axis("layer", stages, 0),
    )
    chart.image(picture)
    layers = stages // 2
    step = max(1, -(-layers // 8))
    marks = [(2.0 * layer + 1, str(layer)) for layer in range(0, layers, step)]
    note = chips(OF_KIND) + f"<span>full colour: {short(deepest)} rows, all ranks together</span>"
    return figure("Queue depth by stage and time", chart.svg("queue depth", y_names=marks), note)


def batch_sizes(run: Run) -> str:
    """Executed batches of each kind by rows, in powers of two."""
    kinds = {k: v for k, v in run.cluster.get("batch_sizes", {}).items() if v}
    if not kinds:
        return ""
    bins = {kind: _octaves(sizes) for kind, sizes in kinds.items()}
    last = max(max(each) for each in bins.values())
    highest = max(max(each.values()) for each in bins.values())
    chart = Chart(
        Axis("rows of a batch", 1, 2.0 ** (last + 1), log=True), linear("% of batches", [highest])
    )
    width = 1 / (len(bins) + 0.4)
    for place, (kind, each) in enumerate(bins.items()):
        for octave, share in each.items():
            left, right = (2 ** (octave + (place + more) * width) for more in (0.2, 1.2))
            title = (
                f"{kind}: {share:.1f} % of batches have {2**octave} to {2 ** (octave + 1) - 1} rows"
            )
            chart.bar(left, right, share, OF_KIND[kind], title)
    step = max(1, -(-(last + 1) // 8))
    marks = [(2.0**octave, short(2.0**octave)) for octave in range(0, last + 2, step)]
    note = chips({kind: OF_KIND[kind] for kind in bins})
    return figure("Batch sizes", chart.svg("histogram of batch sizes", marks), note)


def stage_delays(run: Run) -> str:
    """Mean time that rows wait at each stage."""
    stages = run.cluster.get("stages")
    if not stages:
        return ""
    delays = [delay or 0.0 for delay in stages["queue_delay_ms"]]
    chart = Chart(Axis("layer", 0, len(delays) / 2), linear("mean wait (ms)", delays))
    layers = len(delays) // 2
    marks = [(layer + 0.5, str(layer)) for layer in range(0, layers, max(1, -(-layers // 8)))]
    marks.append((layers + 0.25, "H"))
    for index, (name, delay) in enumerate(zip(stages["names"], delays, strict=True)):
        kind = "head" if name == "H" else "attention" if name[0] == "A" else "expert"
        chart.bar(index / 2, index / 2 + 0.5, delay, OF_KIND[kind], f"{name}: {delay:.2f} ms")
    return figure("Queueing delay by stage", chart.svg("queueing delay", marks), chips(OF_KIND))


def over_time(run: Run) -> str:
    """Tokens per second over the run."""
    data = run.metrics["over_time"]
    rates = data["tokens_per_s"]
    if not any(rates):
        return ""
    times_s = [(index + 0.5) * data["bin_s"] for index in range(len(rates))]
    around = np.convolve(np.ones(len(rates)), np.ones(SMOOTH), "same")  # fewer at the ends
    smooth = (np.convolve(rates, np.ones(SMOOTH), "same") / around).tolist()
    chart = Chart(linear("time (s)", times_s), linear("tokens/s", smooth))
    chart.line(times_s, smooth, colour(0))
    begin_s = run.metrics["window"]["begin_s"]
    if begin_s > 0:
        chart.line([begin_s, begin_s], [0, max(smooth)], "currentColor", dashed=True)
    note = "<span>the window begins at the dashed line</span>" if begin_s > 0 else ""
    return figure("Tokens over time", chart.svg("tokens per second over time"), note)


def links(run: Run) -> str:
    """Bytes per second from every rank to every other."""
    data = run.cluster.get("links", {})
    matrix = np.array(data.get("bytes_per_s", []), np.float64)
    if matrix.size < 2 or not matrix.any():
        return ""
    capacity = data["capacity_bytes_per_s"]
    top, ranks = float(matrix.max()), len(matrix)
    chart = Chart(Axis("to rank", 0, ranks), Axis("from rank", ranks, 0))
    shade = np.tile(np.array([[124, 77, 200]], np.uint8), (ranks, 1))
    chart.image(opacity_picture(matrix / top, shade))
    source, target = np.unravel_index(int(matrix.argmax()), matrix.shape)
    used = f", {100 * top / capacity:.2g} % of the link" if capacity else ""
    step = max(1, -(-ranks // 8))
    marks = [(rank + 0.5, str(data["ranks"][rank])) for rank in range(0, ranks, step)]
    busiest = f"{data['ranks'][source]} to {data['ranks'][target]}"
    note = f"<span>full colour: the busiest, {busiest}, with {short(top)}B/s{used}</span>"
    return figure("Link utilisation (payload)", chart.svg("bytes by link", marks, marks), note)


def figure(title: str, svg: str, note: str = "") -> str:
    """A chart with its title above and what explains it below."""
    caption = f"<figcaption>{note}</figcaption>" if note else ""
    return f"<figure><h3>{escape(title)}</h3>{svg}{caption}</figure>"


def chips(shades: Mapping[str, str]) -> str:
    """Names with their colours."""
    return "".join(
        f'<span><i style="background:{shade}"></i>{escape(name)}</span>'
        for name, shade in shades.items()
    )


def legend(shades: Mapping[str, str]) -> str:
    """Chips, where there is more than one."""
    return chips(shades) if len(shades) > 1 else ""


def series_colours(runs: Sequence[Run]) -> dict[str, str]:
    """A colour for each series, in order of first use."""
    names = dict.fromkeys(run.series for run in runs)
    return {name: colour(index) for index, name in enumerate(names)}


def _octaves(sizes: Mapping[str, int]) -> dict[int, float]:
    """Percent of batches by floor(log2(rows))."""
    total = sum(sizes.values())
    found: dict[int, float] = {}
    for size, count in sizes.items():
        octave = int(math.log2(max(1, int(size))))
        found[octave] = found.get(octave, 0.0) + 100 * count / total
    return found
