"""The report of a benchmark run: plots as files, and one HTML page that holds them all."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from .friendly import output_folder, write_text
from .page import Cell, Page, environment_table
from .plots import geometric_mean, roofline, speedup_bars
from .results import Row
from .suites import SUITES
from .timers import Ceilings

SLOWER = 0.95  # below this ratio a row is marked: noise alone does not explain it


def write_report(folder: Path, run: dict[str, Any], ceilings: Ceilings, rows: Sequence[Row]) -> Path:
    """Writes ``plots/*.svg`` and ``report.html`` into ``folder``."""
    plots = output_folder(folder / "plots")
    page = Page("flashdwc benchmark", f"{run['device']} · PyTorch {run['torch']} · flashdwc {run['flashdwc']}")
    page.cards(list(_cards(rows, ceilings)))
    for suite in dict.fromkeys(row.suite for row in rows):
        own = [row for row in rows if row.suite == suite]
        page.section(SUITES[suite].title, f"Suite {suite}: {_summary(own)}")
        for direction, dtype, part in _groups(own):
            name = f"{direction.replace('_', ' ')}, {dtype}"
            drawing = speedup_bars(part, name)
            write_text(plots / f"{suite}-{direction}-{dtype}.svg", drawing)
            page.svg(drawing, f"Speed-up per layer, {name}")
        with page.fold(f"All {len(own)} rows"):
            _rows_table(page, own)
    _rooflines(page, plots, ceilings, rows)
    page.section("How it was measured")
    page.text(
        "Every candidate ran once per round in one process; the times are medians, p20 and p80 in milliseconds. "
        "The ratio compares with the fastest baseline in either memory layout. The floor is the larger of compulsory "
        "bytes over the copy bandwidth and operations over the matrix-product rate, both measured in this run. "
        "On a CPU operands may sit in the cache, so a small layer can beat the floor of main memory."
    )
    shown = {name: value for name, value in run.items() if name != "ceilings"}
    environment_table(page, {**shown, "suites": ", ".join(run["suites"])})
    return write_text(folder / "report.html", page.html())


def _cards(rows: Sequence[Row], ceilings: Ceilings) -> Iterator[tuple[str | Cell, str, str]]:
    for direction in dict.fromkeys(row.direction for row in rows):
        ratios = [row.ratio for row in rows if row.direction == direction and row.ratio]
        if ratios:
            mean = geometric_mean(ratios)
            yield (
                Cell(f"{mean:.2f}x", "good" if mean >= 1 else ""),
                direction.replace("_", " "),
                f"geometric mean of {len(ratios)} rows, {min(ratios):.2f} to {max(ratios):.1f}",
            )
    yield f"{ceilings.copy_gbytes:,.0f} GB/s", "copy bandwidth", "reads and writes together"
    for name, rate in ceilings.gemm_tflops.items():
        yield f"{rate:.3g}", f"TFLOP/s, {name}", "matrix product"


def _summary(rows: Sequence[Row]) -> str:
    ratios = [row.ratio for row in rows if row.ratio is not None]
    counts = f"{sum(row.status == 'ok' for row in rows)} rows measured"
    for status in ("skipped", "failed"):
        if number := sum(row.status == status for row in rows):
            counts += f", {number} {status}"
    if not ratios:
        return counts + "."
    slower = sum(ratio < SLOWER for ratio in ratios)
    return f"{counts}, geometric mean {geometric_mean(ratios):.2f}x, {slower} below {SLOWER}x."


def _groups(rows: Sequence[Row]) -> Iterator[tuple[str, str, list[Row]]]:
    for direction in dict.fromkeys(row.direction for row in rows):
        for dtype in dict.fromkeys(row.dtype for row in rows):
            part = [r for r in rows if (r.direction, r.dtype) == (direction, dtype) and r.ratio is not None]
            if part:
                yield direction, dtype, part


def _rooflines(page: Page, plots: Path, ceilings: Ceilings, rows: Sequence[Row]) -> None:
    measured = [row for row in rows if row.ms]
    if not measured:
        return
    page.section("Roofline", "Filled: flashdwc. Hollow: PyTorch's fastest baseline on the same work.")
    for dtype in dict.fromkeys(row.dtype for row in measured):
        drawing = roofline(measured, ceilings, dtype)
        write_text(plots / f"roofline-{dtype}.svg", drawing)
        page.svg(drawing, f"Roofline, {dtype}")


def _rows_table(page: Page, rows: Sequence[Row]) -> None:
    columns = (
        "layer", "shape", "dtype", "layout", "direction", "ms", "p20 to p80", "PyTorch ms", "ratio",
        "same layout", "TFLOP/s", "GB/s", "of floor", "backend",
    )  # fmt: skip
    page.table(columns, [_cells(row) for row in rows], numbers=range(5, 13))


def _cells(row: Row) -> list[str | Cell]:
    start: list[str | Cell] = [row.case, row.shape, row.dtype, row.layout, row.direction.replace("_", " ")]
    if row.ms is None:
        return [*start, *[""] * 8, f"{row.status}: {row.reason}"]
    ratio, alike = (
        "" if value is None else Cell(f"{value:.2f}x", "bad" if value < SLOWER else "good")
        for value in (row.ratio, row.ratio_same_layout)
    )
    theirs = "" if row.best_baseline_ms is None else f"{row.best_baseline_ms:.4g}"
    return [
        *start, f"{row.ms:.4g}", f"{row.p20:.4g} to {row.p80:.4g}", theirs, ratio, alike,
        f"{row.tflops:.3g}", f"{row.gbytes:.4g}", f"{row.floor_fraction:.0%}", row.backend,
    ]  # fmt: skip
