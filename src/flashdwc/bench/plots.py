"""Figures of a benchmark run, drawn with matplotlib into SVG text."""

from __future__ import annotations

import io
from collections import defaultdict
from collections.abc import Sequence
from math import exp, log
from typing import Any

from .friendly import require
from .results import Row
from .timers import Ceilings

INK, MUTED, GRID = "#1b2430", "#66717f", "#e4e8ee"
OURS, THEIRS = "#0f7b6c", "#b9c2cd"
LAYOUT_COLORS = {"channels_last": "#0f7b6c", "contiguous": "#e08a2c"}
DIRECTION_COLORS = {"forward": "#0f7b6c", "input_grad": "#3b6fb6", "weight_grad": "#e08a2c", "train": "#8a4fa3"}
WIDTH = 5.8  # inches: a phone shows it without shrinking the text too much


def figure(width: float = WIDTH, height: float = 3.4, columns: int = 1, rows: int = 1) -> tuple[Any, Any]:
    """A figure and its axes in the house style. It knows no global state, so threads may draw at once."""
    require("matplotlib")
    from matplotlib.figure import Figure

    fig = Figure(figsize=(width, height), layout="constrained")
    axes = fig.subplots(rows, columns)
    for ax in [axes] if rows * columns == 1 else list(axes.flat):
        style(ax)
    return fig, axes


def style(ax: Any) -> None:
    for side in ("top", "right"):
        ax.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        ax.spines[side].set_color(GRID)
    ax.tick_params(colors=MUTED, labelsize=9, length=0)
    ax.xaxis.label.set_color(MUTED)
    ax.yaxis.label.set_color(MUTED)
    ax.grid(True, color=GRID, linewidth=0.8)
    ax.set_axisbelow(True)


def plain_ticks(axis: Any, unit: str = "") -> None:
    """Ticks at 1, 2 and 5 of each decade, written as plain numbers, for a logarithmic axis."""
    from matplotlib.ticker import LogLocator, NullLocator

    axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(lambda value, _: f"{value:g}{unit}")


def svg(fig: Any) -> str:
    buffer = io.StringIO()
    fig.savefig(buffer, format="svg", facecolor="white")
    return buffer.getvalue()


def geometric_mean(values: Sequence[float]) -> float:
    return exp(sum(map(log, values)) / len(values))


def speedup_bars(rows: Sequence[Row], title: str) -> str:
    """One bar per layer and layout: the speed-up over the best baseline, its range over batch sizes as a line."""
    groups: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        if row.ratio is not None:
            groups[_layer(row)][row.layout].append(row.ratio)
    layouts = [layout for layout in LAYOUT_COLORS if any(layout in group for group in groups.values())]
    thickness = 0.76 / max(1, len(layouts))
    fig, ax = figure(height=1.3 + 0.34 * len(groups))
    everything = [ratio for group in groups.values() for ratios in group.values() for ratio in ratios]
    low, high = min(0.8, *everything, 0.8), max(1.25, *everything, 1.25)
    ax.set_xscale("log")
    ax.set_xlim(low / 1.1, high * 1.45)
    for place, layout in enumerate(layouts):
        for index, group in enumerate(groups.values()):
            if layout not in group:
                continue
            mean, y = geometric_mean(group[layout]), index + (place - (len(layouts) - 1) / 2) * thickness
            ax.barh(y, mean - 1, left=1, height=thickness * 0.9, color=LAYOUT_COLORS[layout])
            if len(group[layout]) > 1:
                ax.plot([min(group[layout]), max(group[layout])], [y, y], color=INK, linewidth=0.9)
            end = max(mean, *group[layout], 1.0)
            ax.text(end * 1.03, y, f"{mean:.2f}x", va="center", fontsize=7.5, color=INK)
    ax.axvline(1, color=INK, linewidth=1)
    ax.set_yticks(range(len(groups)), list(groups))
    ax.set_ylim(len(groups) - 0.4, -0.6)
    ax.grid(False, axis="y")
    plain_ticks(ax.xaxis, "x")
    ax.set_xlabel("speed-up over PyTorch's best (right of 1 is faster)")
    ax.set_title(title, loc="left", fontsize=11, color=INK)
    handles = [_swatch(LAYOUT_COLORS[layout], layout) for layout in layouts]
    fig.legend(handles=handles, loc="outside lower right", ncols=2, frameon=False, fontsize=8.5)
    return svg(fig)


def roofline(rows: Sequence[Row], ceilings: Ceilings, dtype: str) -> str:
    """Achieved arithmetic rate against intensity (FLOP per compulsory byte), under this machine's measured roof."""
    measured = [row for row in rows if row.dtype == dtype and row.tflops and row.gbytes and row.ms]
    fig, ax = figure(height=4.2)
    points: dict[str, list[tuple[float, float]]] = defaultdict(list)
    theirs: list[tuple[float, float]] = []
    for row in measured:
        assert row.tflops and row.gbytes and row.ms  # the filter above, for the type checker
        intensity = row.tflops * 1e3 / row.gbytes
        points[row.direction].append((intensity, row.tflops))
        if row.best_baseline_ms:
            theirs.append((intensity, row.tflops * row.ms / row.best_baseline_ms))
    if theirs:
        ax.scatter(
            *zip(*theirs, strict=True), s=16, facecolors="none", edgecolors=MUTED, label="PyTorch, best", linewidths=0.8
        )
    for direction, pairs in points.items():
        ax.scatter(
            *zip(*pairs, strict=True), s=18, color=DIRECTION_COLORS[direction], label=direction.replace("_", " ")
        )
    rate = ceilings.rate(dtype)
    intensities = [x for pairs in points.values() for x, _ in pairs]
    ridge = rate * 1e3 / ceilings.copy_gbytes
    left, right = min([*intensities, ridge]) / 2, max([*intensities, ridge]) * 3
    roof = [(left, left * ceilings.copy_gbytes / 1e3), (ridge, rate), (right, rate)]
    ax.plot(*zip(*roof, strict=True), color=INK, linewidth=1.4)
    ax.text(right, rate * 1.08, f"matrix product {rate:.3g} TFLOP/s", ha="right", fontsize=8.5, color=INK)
    ax.set_xscale("log")
    ax.set_yscale("log")
    ax.set_xlabel("intensity, FLOP per byte")
    ax.set_ylabel("TFLOP/s")
    ax.set_title(f"Roofline, {dtype}: copy {ceilings.copy_gbytes:,.0f} GB/s", loc="left", fontsize=11, color=INK)
    fig.legend(loc="outside lower center", ncols=3, frameon=False, fontsize=8.5)
    return svg(fig)


def _layer(row: Row) -> str:
    """The case without its batch size."""
    return f"{row.case}  {row.shape.split('x', 1)[1]}" if row.case else row.shape


def _swatch(color: str, label: str) -> Any:
    from matplotlib.patches import Patch

    return Patch(color=color, label=label.replace("_", " "))
