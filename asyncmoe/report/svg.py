"""Charts as SVG elements, in colours of the page's style sheet, so that they follow its theme."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from asyncmoe.report.axis import Axis, short

WIDTH, HEIGHT = 460.0, 290.0
LEFT, RIGHT, TOP, BOTTOM = 70.0, 18.0, 12.0, 46.0
COLOURS = 16

Names = Sequence[tuple[float, str]]  # marks of an axis


def colour(index: int) -> str:
    """The style sheet's colour of the index-th series."""
    return f"var(--c{index % COLOURS})"


class Chart:
    """One chart: two axes and what is drawn over them."""

    def __init__(self, x: Axis, y: Axis) -> None:
        self._x, self._y = x, y
        self._parts: list[str] = []
        self._points: list[tuple[float, float]] = []  # where there are some, on the page

    def line(
        self, xs: Sequence[float], ys: Sequence[float], stroke: str, dashed: bool = False
    ) -> None:
        """A line through the points."""
        points = " ".join(f"{x:.1f},{y:.1f}" for x, y in map(self._at, xs, ys))
        dash = ' stroke-dasharray="5 4"' if dashed else ""
        self._parts.append(
            f'<polyline points="{points}" fill="none" stroke="{stroke}" stroke-width="2"{dash}/>'
        )

    def point(self, x: float, y: float, fill: str, title: str) -> None:
        """A point that says `title` when it is pointed at; a ring around those it would hide."""
        left, top = self._at(x, y)
        below = sum(abs(left - x0) + abs(top - y0) < 3 for x0, y0 in self._points)
        self._points.append((left, top))
        look = f'r="{5 + 3.5 * below:g}" fill="none" stroke="{fill}" stroke-width="2.5"'
        if not below:
            look = f'r="5" fill="{fill}"'
        self._parts.append(
            f'<circle cx="{left:.1f}" cy="{top:.1f}" {look}><title>{escape(title)}</title></circle>'
        )

    def bar(self, x: float, until: float, height: float, fill: str, title: str) -> None:
        """A bar from the axis up."""
        left, top = self._at(x, height)
        right, ground = self._at(until, self._y.low)
        self._parts.append(
            f'<rect x="{left:.1f}" y="{top:.1f}" width="{max(right - left - 1, 1):.1f}" '
            f'height="{max(ground - top, 0):.1f}" fill="{fill}">'
            f"<title>{escape(title)}</title></rect>"
        )

    def image(self, data_url: str) -> None:
        """A picture over the whole plane; its pixels stay sharp."""
        width, height = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM
        self._parts.append(
            f'<image x="{LEFT}" y="{TOP}" width="{width}" height="{height}" href="{data_url}" '
            'preserveAspectRatio="none" style="image-rendering:pixelated"/>'
        )

    def svg(self, alt: str, x_names: Names | None = None, y_names: Names | None = None) -> str:
        """The chart as an element. `x_names`, `y_names`: marks instead of round numbers."""
        return (
            f'<svg viewBox="0 0 {WIDTH:g} {HEIGHT:g}" role="img" aria-label="{escape(alt)}">'
            + self._grid(x_names or _numbers(self._x), y_names or _numbers(self._y))
            + "".join(self._parts)
            + "</svg>"
        )

    def _at(self, x: float, y: float) -> tuple[float, float]:
        return (
            LEFT + self._x.place(x) * (WIDTH - LEFT - RIGHT),
            HEIGHT - BOTTOM - self._y.place(y) * (HEIGHT - TOP - BOTTOM),
        )

    def _grid(self, x_names: Names, y_names: Names) -> str:
        parts = []
        bottom = HEIGHT - BOTTOM
        for tick, name in x_names:
            left = self._at(tick, self._y.low)[0]
            parts.append(
                f'<line class="grid" x1="{left:.1f}" x2="{left:.1f}" y1="{TOP}" y2="{bottom}"/>'
            )
            parts.append(
                f'<text x="{left:.1f}" y="{bottom + 16}" text-anchor="middle">{escape(name)}</text>'
            )
        for tick, name in y_names:
            top = self._at(self._x.low, tick)[1]
            parts.append(
                f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{top:.1f}" '
                f'y2="{top:.1f}"/>'
            )
            parts.append(
                f'<text x="{LEFT - 6}" y="{top + 4:.1f}" text-anchor="end">{escape(name)}</text>'
            )
        middle = (TOP + bottom) / 2
        parts.append(
            f'<text class="label" x="{(LEFT + WIDTH - RIGHT) / 2}" y="{HEIGHT - 8}" '
            f'text-anchor="middle">{escape(self._x.label)}</text>'
            f'<text class="label" x="12" y="{middle}" text-anchor="middle" '
            f'transform="rotate(-90 12 {middle})">{escape(self._y.label)}</text>'
        )
        return "".join(parts)


def _numbers(axis: Axis) -> Names:
    return [(tick, short(tick)) for tick in axis.ticks()]
