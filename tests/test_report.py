"""The report: one file that shows everything and fetches nothing."""

from __future__ import annotations

import base64
import re
import struct
import zlib
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from asyncmoe.errors import ConfigError
from asyncmoe.metrics.recorder import REASONS, Record
from asyncmoe.metrics.summary import MeasureConfig, summarise
from asyncmoe.outfile import write_file
from asyncmoe.report.axis import Axis, linear, logarithmic, short
from asyncmoe.report.page import page, write_report
from asyncmoe.report.picture import opacity_picture
from asyncmoe.report.results import Published, Results, Run, read_results

VOID = {"meta"}


class Checker(HTMLParser):
    """Notes unbalanced tags and everything that a browser would fetch."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.fetched: list[str] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in VOID:
            self.open.append(tag)
        self.note(attrs)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.note(attrs)

    def note(self, attrs: list[tuple[str, str | None]]) -> None:
        links = [value or "" for name, value in attrs if name in ("src", "href")]
        self.fetched += [link for link in links if not link.startswith("data:")]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def run(name: str, series: str, gap_s: float = 0.02) -> Run:
    times: NDArray[Any] = gap_s * np.arange(1, 101)
    record = Record(
        end_s=4.0,
        arrival_s=np.zeros(1),
        ended_s=times[-1:],
        reason=np.array([REASONS.index("length")], np.int8),
        prompt_tokens=np.array([5]),
        output_tokens=np.array([100]),
        underway=np.zeros(1, np.bool_),
        token_request=np.zeros(100, np.int64),
        token_s=times,
    )
    cluster: dict[str, Any] = {
        "device_utilisation": 0.5,
        "hidden_share": 0.75,
        "mean_rows": {"attention": 3.0, "expert": 4.0, "head": 2.0},
        "links": {
            "ranks": [0, 1],
            "bytes_per_s": [[0, 5e6], [4e6, 0]],
            "capacity_bytes_per_s": 1e7,
        },
        "batch_sizes": {"attention": {"1": 4, "9": 1}, "expert": {"700": 2}, "head": {}},
        "stages": {"names": ["A0", "E0", "H"], "queue_delay_ms": [1.0, 2.5, None]},
        "depth": {"time_s": [0.0, 1.0, 2.0], "rows": [[1, 2, 3], [0, 9, 0], [0, 0, 1]]},
        "ranks": {},
    }
    return Run(name, series, {}, summarise(record, MeasureConfig()), cluster)


def results(*runs: Run, **changes: Any) -> Results:
    plain = Results(
        "A <title> & more", "virtual", "asyncmoe simulate x.toml", {"model": {"name": "m<1>"}},
        {"lengths": "gsm8k"}, {"ramp_s": 1.0}, list(runs),
    )  # fmt: skip
    return replace(plain, **changes)


def checked(made: Results) -> Checker:
    checker = Checker()
    checker.feed(page(made))
    assert not checker.open
    return checker


def test_a_report_is_whole_and_fetches_nothing() -> None:
    runs = [run(f"{s} at {g}", s, g) for s in ("mtfs", "defrag") for g in (0.01, 0.02)]
    figure = Published("tokens/s", 100.0, 90.0, "tok/s", "a paper", "slower NIC")
    checker = checked(results(*runs, published=[figure]))
    assert checker.fetched == []
    for text in ("A <title> & more", "asyncmoe simulate x.toml", 'model.name = "m<1>"'):
        assert text in checker.text
    for title in (
        "Throughput against ITL", "ITL distribution", "Queue depth by stage and time",
        "Batch sizes", "Link utilisation", "Queueing delay by stage", "a paper", "0.900",
    ):  # fmt: skip
        assert title in checker.text
    assert "50 % of the link" in checker.text
    assert len(page(results(*runs))) < 200_000


def test_one_run_has_tiles_and_its_rate_over_time() -> None:
    text = checked(results(run("mtfs", "mtfs"))).text
    assert "Tokens over time" in text
    assert "Throughput against ITL" not in text


def test_a_run_without_tokens_has_a_report() -> None:
    empty = run("none", "none")
    nothing = Record(1.0, *(np.zeros(0),) * 2, np.zeros(0, np.int8), *(np.zeros(0, np.int64),) * 2,
                     np.zeros(0, np.bool_), np.zeros(0, np.int64), np.zeros(0))  # fmt: skip
    bare = replace(empty, metrics=summarise(nothing, MeasureConfig()), cluster={})
    checked(results(bare))


def test_results_are_read_as_they_were_written(tmp_path: Path) -> None:
    made = results(run("mtfs", "mtfs"))
    (tmp_path / "r.json").write_bytes(made.to_json())
    again = read_results(tmp_path / "r.json")
    assert again.to_json() == made.to_json()
    assert page(again) == page(made)
    (tmp_path / "r.json").write_text('{"title": 3}')
    with pytest.raises(ConfigError, match=r"holds no results: title"):
        read_results(tmp_path / "r.json")


def test_a_report_that_cannot_be_written_is_an_error_with_its_path(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be written"):
        write_report(results(run("a", "a")), tmp_path / "no" / "r.html")


def test_a_file_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    write_file(tmp_path / "a", b"all")
    assert [(path.name, path.read_bytes()) for path in tmp_path.iterdir()] == [("a", b"all")]
    with pytest.raises(ConfigError, match="/dev/full cannot be written: No space left"):
        write_file(Path("/dev/full"), b"x")
    (tmp_path / "link").symlink_to(tmp_path / "a")
    write_file(tmp_path / "link", b"new")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "a").read_bytes() == b"new"


def test_a_report_names_the_runs_that_failed_even_if_all_have() -> None:
    made = results(failed={"mtfs": "it was <ended>"})
    assert "<b>mtfs</b>: it was &lt;ended&gt;" in page(made)


def test_points_of_equal_results_do_not_hide_each_other() -> None:
    text = page(results(run("a", "a"), run("b", "b")))
    rings = re.findall(r'<circle [^>]*r="([\d.]+)" fill="none"', text)
    assert rings == ["8.5"]


def test_a_picture_is_a_png_of_colour_and_opacity() -> None:
    url = opacity_picture(np.array([[0.0, 0.5], [1.0, 2.0]]), np.array([[9, 8, 7]] * 2, np.uint8))
    data = base64.b64decode(url.removeprefix("data:image/png;base64,"))
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    assert struct.unpack(">II", data[16:24]) == (2, 2)
    body = re.search(rb"IDAT(.*)....\x00\x00\x00\x00IEND", data, re.DOTALL)
    assert body is not None
    lines = np.frombuffer(zlib.decompress(body[1]), np.uint8).reshape(2, 9)
    assert lines[:, 1:].reshape(2, 2, 4).tolist() == [
        [[9, 8, 7, 0], [9, 8, 7, 128]],
        [[9, 8, 7, 255], [9, 8, 7, 255]],
    ]


@pytest.mark.parametrize("high", [0.003, 1.0, 37.0, 99.0, 4_200.0, 3.1e7])
def test_axes_have_some_round_marks_within_their_ends(high: float) -> None:
    for axis in (linear("x", [high]), logarithmic("x", [high, high / 50])):
        ticks = axis.ticks()
        assert 3 <= len(ticks) <= 9
        assert all(axis.low * 0.99 <= tick <= axis.high * 1.01 for tick in ticks)
        places = [axis.place(tick) for tick in ticks]
        assert places == sorted(places)


def test_an_axis_may_run_down() -> None:
    assert Axis("rank", 4, 0).place(1) == 0.75


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (5e-4, "5e-4"), (0.02, "0.02"), (1024, "1024"), (15_000, "15k"), (2.5e9, "2.5G")],
)
def test_numbers_are_short(value: float, text: str) -> None:
    assert short(value) == text
