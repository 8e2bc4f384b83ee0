"""Line charts, stacked bars and bars as inline SVG.

The plot stretches with the page while text keeps its size: shapes are SVG in a 0..100 box that
ignores its aspect ratio (strokes do not scale), labels are HTML placed by percentage.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from trainmark.report.markup import Markup, join, tag
from trainmark.run.curves import Curve, Point

COLOURS = 6
"""How many series colours the style sheet has; more series start again."""


@dataclass(frozen=True)
class Series:
    label: str
    curve: Curve
    colour: int = 0
    dashed: bool = False
    dots: bool = False
    """Mark each point: for curves of few."""


@dataclass(frozen=True)
class Level:
    """A horizontal line, such as a target."""

    label: str
    y: float
    style: str


@dataclass(frozen=True)
class Tick:
    """A place on the x axis with a name of its own."""

    x: float
    label: str


@dataclass(frozen=True)
class Axes:
    x_low: float
    x_high: float
    y_low: float
    y_high: float
    x_ticks: list[float]
    y_ticks: list[float]

    def x(self, value: float) -> float:
        return round(100 * (value - self.x_low) / (self.x_high - self.x_low), 3)

    def y(self, value: float) -> float:
        return round(100 - 100 * (value - self.y_low) / (self.y_high - self.y_low), 3)


def line_chart(
    series: Sequence[Series],
    x_label: str,
    y_label: str,
    levels: Sequence[Level] = (),
    x_ticks: Sequence[Tick] | None = None,
) -> Markup:
    """Curves with axes, grid, levels and a legend; a sentence where there is no point to draw.

    `x_ticks`: instead of round numbers from 0 on.
    """
    points = [point for one in series for point in one.curve.points]
    if not points:
        return tag("p", f"No {y_label} was recorded.", class_="empty")
    axes = _axes(points, levels, x_ticks)
    x_places = [axes.x(tick) for tick in axes.x_ticks]
    x_texts = [tick.label for tick in x_ticks] if x_ticks else tick_texts(axes.x_ticks)
    y_places = [axes.y(tick) for tick in axes.y_ticks]
    plot = _stretched(
        tag("title", f"{y_label} over {x_label}"),
        *(_across(y, "grid") for y in y_places),
        *(_across(axes.y(level.y), f"level {level.style}") for level in levels),
        *(_band(axes, one) for one in series),
        *(_lines(axes, one) for one in series),
        *(_dots(axes, one, y_label) for one in series),
    )
    return tag(
        "figure",
        _legend(series, levels, y_label),
        tag(
            "div",
            tag("div", *_labels(tick_texts(axes.y_ticks), "top", y_places), class_="y-axis"),
            tag("div", plot, class_="plot"),
            tag("div", *_labels(x_texts, "left", x_places), class_="x-axis"),
            class_="chart",
        ),
        tag("p", x_label, class_="axis-title"),
    )


def _stretched(*shapes: Markup, class_: str | None = None) -> Markup:
    """A picture of 100 x 100 that fills the place it is given."""
    return tag(
        "svg",
        *shapes,
        xmlns="http://www.w3.org/2000/svg",
        viewBox="0 0 100 100",
        preserveAspectRatio="none",
        class_=class_,
        role="img",
    )


# --- axes


def _axes(points: Sequence[Point], levels: Sequence[Level], x_ticks: Sequence[Tick] | None) -> Axes:
    # Every line is inside; of the bands, all but the highest and lowest twentieth, or one spike
    # would flatten the curve.
    some = len(points) // 20
    band = [sorted(p.low for p in points)[some], sorted(p.high for p in points)[-1 - some]]
    ys = [point.y for point in points] + [level.y for level in levels] + band
    y_low, y_high = _padded(min(ys), max(ys))
    if x_ticks:
        x_low, x_high = _padded(min(t.x for t in x_ticks), max(t.x for t in x_ticks))
        places = [tick.x for tick in x_ticks]
    else:
        x_low, x_high = min(0.0, *(p.x for p in points)), max(p.x for p in points)
        x_high += 0.015 * (x_high - x_low) or 1.0  # room for half a dot
        places = nice_ticks(x_low, x_high)
    return Axes(x_low, x_high, y_low, y_high, places, nice_ticks(y_low, y_high))


def _padded(low: float, high: float) -> tuple[float, float]:
    margin = 0.06 * (high - low) or abs(high) * 0.01 or 0.5
    return low - margin, high + margin


def nice_ticks(low: float, high: float) -> list[float]:
    """Round numbers within `low`..`high`, about five of them."""
    step = nice_step((high - low) / 5)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [_clean(index * step) for index in range(first, last + 1)]


def nice_step(rough: float) -> float:
    """The next 1, 2, 2.5 or 5 times a power of ten."""
    power = 10.0 ** math.floor(math.log10(rough))
    return next(m * power for m in (1, 2, 2.5, 5, 10) if m * power >= rough * 0.999)


def _clean(value: float) -> float:
    return float(f"{value:.10g}") or 0.0  # neither 0.30000000000000004 nor -0


def tick_texts(ticks: Sequence[float]) -> list[str]:
    """Ticks as short texts: 0.25, 1,500, 20k, 1.5M, 4B."""
    return [_tick_text(tick, max(map(abs, ticks))) for tick in ticks]


def _tick_text(tick: float, largest: float) -> str:
    # 5,000 beside 10k would look like two axes, so thousands are short where any is.
    thousands = 1e3 if largest >= 1e4 else math.inf
    for at, size, unit in ((1e9, 1e9, "B"), (1e6, 1e6, "M"), (thousands, 1e3, "k")):
        if abs(tick) >= at:
            return f"{tick / size:.6g}{unit}"
    return f"{tick:,.6g}"


def _labels(texts: Sequence[str], side: str, places: Sequence[float]) -> list[Markup]:
    return [
        tag("span", text, style=f"{side}:{place}%")
        for text, place in zip(texts, places, strict=True)
    ]


# --- what is drawn


def _across(y: float, style: str) -> Markup:
    return tag("line", x1=0, x2=100, y1=y, y2=y, class_=style)


def _band(axes: Axes, series: Series) -> Markup:
    """The range of the measured values behind each drawn mean."""
    pieces = [p for p in series.curve.pieces if any(point.low < point.high for point in p)]
    return join(
        *(
            tag("path", d=_outline(axes, piece), class_=f"band c{series.colour % COLOURS}")
            for piece in pieces
        )
    )


def _outline(axes: Axes, piece: Sequence[Point]) -> str:
    there = [f"{axes.x(p.x)},{axes.y(p.high)}" for p in piece]
    back = [f"{axes.x(p.x)},{axes.y(p.low)}" for p in reversed(piece)]
    return f"M{' L'.join(there + back)} Z"


def _lines(axes: Axes, series: Series) -> Markup:
    style = f"line c{series.colour % COLOURS}{' dashed' if series.dashed else ''}"
    return join(
        *(
            tag(
                "path",
                d="M" + " L".join(f"{axes.x(p.x)},{axes.y(p.y)}" for p in piece),
                class_=style,
            )
            for piece in series.curve.pieces
            if len(piece) > 1
        )
    )


def _dots(axes: Axes, series: Series, y_label: str) -> Markup:
    """Marks of points; a point alone in its piece gets one, too, or it would be invisible."""
    return join(
        *(
            _dot(axes, point, series, y_label)
            for piece in series.curve.pieces
            for point in piece
            if series.dots or len(piece) == 1
        )
    )


def _dot(axes: Axes, point: Point, series: Series, y_label: str) -> Markup:
    # A line of no length with round ends stays a circle however the box is stretched.
    x, y = axes.x(point.x), axes.y(point.y)
    at = f"{point.x:,.0f}" if point.x >= 100 else f"{point.x:.4g}"
    where = f"{series.label}: {y_label} {point.y:.6g} at {at}"
    hint = f"{point.name}: {y_label} {point.y:.6g}" if point.name else where
    path = f"M{x},{y} l0.0001,0"
    return tag("path", tag("title", hint), d=path, class_=f"dot c{series.colour % COLOURS}")


def _legend(series: Sequence[Series], levels: Sequence[Level], y_label: str) -> Markup:
    keys = [
        _key(f"c{one.colour % COLOURS}{' dashed' if one.dashed else ''}", one.label)
        for one in series
        if one.curve.pieces
    ]
    keys += [_key(f"level {level.style}", f"{level.label} {level.y:.4g}") for level in levels]
    return tag("figcaption", tag("strong", y_label), *keys)


def _key(style: str, label: str) -> Markup:
    return tag("span", tag("i", class_=f"swatch {style}"), label, class_="key")


# --- stacked bars


def stacked_bar(parts: Sequence[tuple[str, str, float]], full: float) -> Markup:
    """One bar of (kind, label, seconds) parts, drawn to the scale of `full`."""
    x = 0.0
    shapes = []
    for kind, label, size in parts:
        width = 100 * size / full if full > 0 else 0.0
        hint = tag("title", f"{label}: {size:,.2f} s")
        place = {"x": f"{x:.3f}", "y": "0", "width": f"{width:.3f}", "height": "100"}
        shapes.append(tag("rect", hint, **place, class_=f"t-{kind}"))
        x += width
    return _stretched(*shapes, class_="bar")


# --- bars


@dataclass(frozen=True)
class Bar:
    """A number with its standard error."""

    label: str
    value: float
    error: float | None
    text: str
    """The number, as it is shown."""


def bar_chart(bars: Sequence[Bar]) -> Markup:
    """Bars below each other, from a common zero."""
    ends = [bar.value + sign * 2 * (bar.error or 0.0) for bar in bars for sign in (-1, 1)]
    low, high = min(0.0, *ends), max(0.0, *ends)
    full = (high - low) or 1.0

    def place(value: float) -> float:
        return round(100 * (value - low) / full, 3)

    return tag("div", *(cell for bar in bars for cell in _bar(bar, place)), class_="bars")


def _bar(bar: Bar, place: Callable[[float], float]) -> tuple[Markup, Markup, Markup]:
    zero, end, error = place(0.0), place(bar.value), 2 * (bar.error or 0.0)
    whisker = tag(
        "line", x1=place(bar.value - error), x2=place(bar.value + error), y1=50, y2=50,
        class_="whisker",
    )  # fmt: skip
    shape = tag(
        "rect", x=min(zero, end), width=round(abs(end - zero), 3), y=15, height=70, class_="f0"
    )
    plot = _stretched(tag("title", f"{bar.label}: {bar.text}"), shape, whisker)
    return tag("span", bar.label, class_="name"), plot, tag("span", bar.text, class_="num")
