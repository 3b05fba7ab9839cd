"""Writes the measured numbers into the documentation: every speed figure there comes from ``results/h200/*.json``.

    python benchmarks/update_docs.py            rewrite README.md, docs/performance.md and docs/images/speedup.svg
    python benchmarks/update_docs.py --check    change nothing; exit status 1 if one of them is out of date

The JSON files are those of ``flashdwc bench`` (``results.json``, under any name). Where two files hold the same
measurement, the later one counts. Text between the markers belongs to this script, all other text to its authors.
"""

from __future__ import annotations

import argparse
import hashlib
import inspect
import io
import json
import re
import sys
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from flashdwc.bench.plots import DIRECTION_COLORS, INK, MUTED, figure, geometric_mean, plain_ticks
from flashdwc.bench.suites import SUITES

ROOT = Path(__file__).resolve().parent.parent
RESULTS = Path("benchmarks/results/h200")
README, PERFORMANCE, PLOT = Path("README.md"), Path("docs/performance.md"), Path("docs/images/speedup.svg")
NOT_MEASURED = "Not measured yet."
DIRECTIONS = {
    "forward": "forward",
    "input_grad": "input gradient",
    "weight_grad": "weight gradient",
    "train": "all three",
}
GRADIENTS = ("forward", "input_grad", "weight_grad")
HALF = ("fp16", "bf16")
# of the suite "paper": the layer of README's table
LAYER = {"suite": "paper", "n": 128, "c": 256, "h": 64, "w": 64, "dtype": "fp16", "layout": "channels_last"}
LAYER_KERNELS = (3, 5, 7, 9, 13, 31, 51)
KEY = ("suite", "case", "shape", "dtype", "layout", "direction", "timing")

Row = dict[str, Any]  # fields of flashdwc.bench.results.Row
Run = dict[str, Any]  # the header of a results file: machine, versions, commit, date


def load(folder: Path) -> tuple[list[Run], list[Row]]:
    """The headers of all results files, oldest first, and their rows, each measurement once."""
    files = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("*.json"))]
    files.sort(key=lambda content: content["run"]["date"])
    rows = {tuple(row[name] for name in KEY): row for content in files for row in content["rows"]}
    return [content["run"] for content in files], list(rows.values())


def measured(rows: Iterable[Row]) -> list[Row]:
    return [row for row in rows if row["status"] == "ok" and row["ratio"] is not None]


# --- text -------------------------------------------------------------------------------------------------------------


def provenance(runs: Sequence[Run]) -> str:
    """One line for each machine, versions, commit and day: what a reader needs to judge the numbers."""
    lines = [
        "{device}, torch {torch}, cuDNN {cudnn}, ".format(**run) + f"commit {_short(run['commit'])}, {run['date'][:10]}"
        for run in runs
    ]
    return "Measured on: " + "; ".join(dict.fromkeys(lines)) + "."


def _short(commit: str | None) -> str:
    return "unknown" if commit is None else commit[:10] + ("+" if commit.endswith("+") else "")


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def readme_text(runs: Sequence[Run], rows: Sequence[Row]) -> str:
    good = measured(rows)
    if not good:
        return NOT_MEASURED
    return "\n\n".join(filter(None, [provenance(runs), _layer_table(good), _suite_summary(good)]))


def _layer_table(rows: Sequence[Row]) -> str:
    here = [row for row in rows if all(row[name] == value for name, value in LAYER.items()) and row["kh"] == row["kw"]]
    cells = {(row["kh"], row["direction"]): f"{row['ms']:.3f} ms, {row['ratio']:.1f}x" for row in here}
    kernels = [k for k in LAYER_KERNELS if any((k, direction) in cells for direction in GRADIENTS)]
    if not kernels:
        return ""
    size = "{n}x{c}x{h}x{w}, {dtype}, {layout}".format(**LAYER)
    lines = [[f"{k}x{k}", *(cells.get((k, direction), "-") for direction in GRADIENTS)] for k in kernels]
    return f"Input {size}; time, and how many times faster than the best of PyTorch's two layouts:\n\n" + table(
        ["kernel", *(DIRECTIONS[direction] for direction in GRADIENTS)], lines
    )


def _suite_summary(rows: Sequence[Row]) -> str:
    half = [row for row in rows if row["dtype"] in HALF]
    if not half:
        return ""
    lines = []
    for suite, own in _by_suite(half):
        cells = [suite, str(len(own)), f"{geometric_mean([row['ratio'] for row in own]):.2f}x"]
        for layout, against in (("channels_last", "ratio"), ("contiguous", "ratio_same_layout")):
            found = [
                (row[against], row["shape"]) for row in own if row["layout"] == layout and row[against] is not None
            ]
            cells.append("{:.2f}x ({})".format(*min(found)) if found else "-")
        lines.append(cells)
    header = [
        "suite",
        "measurements",
        "geometric mean",
        "worst in channels_last",
        "worst in contiguous, against contiguous",
    ]
    return "All 16-bit measurements, both layouts, over the best of PyTorch's two layouts:\n\n" + table(header, lines)


def performance_text(runs: Sequence[Run], rows: Sequence[Row]) -> str:
    if not measured(rows):
        return NOT_MEASURED
    parts = [provenance(runs)]
    for suite, own in _by_suite(rows):
        title = SUITES[suite].title if suite in SUITES else suite
        parts.append(f"### {suite}: {title}")
        parts.append(_suite_table(own))
        for status in ("failed", "skipped"):
            reasons = [row["reason"] for row in own if row["status"] == status]
            if reasons:
                parts.append(f"{len(reasons)} {status}: " + "; ".join(dict.fromkeys(reasons)) + ".")
    return "\n\n".join(parts)


def _suite_table(rows: Sequence[Row]) -> str:
    groups: dict[tuple[str, ...], list[Row]] = defaultdict(list)
    for row in measured(rows):
        groups[row["direction"], row["dtype"], row["layout"], row["timing"]].append(row)
    lines = []
    for (direction, dtype, layout, timing), own in groups.items():
        ratios = [row["ratio"] for row in own]
        floors = [row["floor_fraction"] for row in own if row["floor_fraction"] is not None]
        lines.append(
            [
                DIRECTIONS[direction], dtype, layout, timing, str(len(own)), f"{geometric_mean(ratios):.2f}x",
                f"{min(ratios):.2f}x", f"{max(ratios):.2f}x", f"{median(floors):.0%}" if floors else "-",
            ]
        )  # fmt: skip
    return table(
        ["direction", "dtype", "layout", "timed", "layers", "geometric mean", "worst", "best", "of the floor"], lines
    )


def _by_suite(rows: Iterable[Row]) -> list[tuple[str, list[Row]]]:
    """In the registry's order."""
    groups: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        groups[row["suite"]].append(row)
    order = [*SUITES, *groups]
    return sorted(groups.items(), key=lambda group: order.index(group[0]))


def replace_between(text: str, name: str, content: str) -> str:
    """``text`` with ``content`` between its markers ``<!-- name:begin -->`` and ``<!-- name:end -->``."""
    begin, end = f"<!-- {name}:begin -->", f"<!-- {name}:end -->"
    if text.count(begin) != 1 or text.count(end) != 1:
        raise SystemExit(f"expected the markers {begin} and {end} once each")
    return re.sub(f"{begin}.*?{end}", lambda _: f"{begin}\n{content}\n{end}", text, flags=re.DOTALL)


# --- the plot ---------------------------------------------------------------------------------------------------------


def plot_series(rows: Sequence[Row]) -> dict[str, list[tuple[int, float]]]:
    """Direction: (kernel size, speed-up) over the layers of the suite "paper", fp16, channels_last."""
    ratios: dict[str, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    for row in measured(rows):
        if row["direction"] in GRADIENTS and all(row[name] == LAYER[name] for name in ("suite", "dtype", "layout")):
            ratios[row["direction"]][row["kh"]].append(row["ratio"])
    return {
        direction: [(k, round(geometric_mean(values), 4)) for k, values in sorted(ratios[direction].items())]
        for direction in GRADIENTS
        if ratios[direction]
    }


def draw(series: dict[str, list[tuple[int, float]]], device: str, mark: str) -> str:
    """The plot as SVG text that is the same from run to run."""
    from matplotlib import rc_context

    fig, ax = figure(width=7.2, height=3.6)
    ax.set_title("Speed-up over PyTorch's best, fp16, channels_last", loc="left", fontsize=11, color=INK)
    if series:
        ax.set_xscale("log")
        ax.set_yscale("log")
        for direction, points in series.items():
            ax.plot(
                *zip(*points), marker="o", markersize=4, color=DIRECTION_COLORS[direction], label=DIRECTIONS[direction]
            )
        ax.axhline(1, color=INK, linewidth=1)
        kernels = sorted({k for points in series.values() for k, _ in points})
        plain_ticks(ax.yaxis, "x")
        ax.set_xticks(kernels, [str(k) for k in kernels])
        ax.minorticks_off()
        ax.set_xlabel(f"kernel size; mean over the maps of the suite 'paper', {device}")
        ax.set_ylabel("times faster")
        ax.legend(frameon=False, fontsize=9)
    else:
        ax.text(0.5, 0.5, "not measured yet", transform=ax.transAxes, ha="center", color=MUTED, fontsize=13)
        ax.set_axis_off()
    buffer = io.StringIO()
    with rc_context({"svg.hashsalt": "flashdwc", "svg.fonttype": "none"}):
        metadata = {"Date": None, "Creator": None, "Description": mark}
        fig.savefig(buffer, format="svg", facecolor="white", metadata=metadata)
    return "\n".join(line.rstrip() for line in buffer.getvalue().splitlines()) + "\n"


def plot_mark(series: dict[str, list[tuple[int, float]]], device: str) -> str:
    """Names what a plot shows and how: versions of matplotlib differ in the bytes, not in this."""
    shown = json.dumps([series, device, inspect.getsource(draw)])
    return "drawn from " + hashlib.sha256(shown.encode()).hexdigest()[:16]


# --- the command ------------------------------------------------------------------------------------------------------


def update(root: Path, *, check: bool) -> list[Path]:
    """Brings the documents under ``root`` up to date, or only looks (``check``); returns those that were not."""
    runs, rows = load(root / RESULTS)
    stale = []
    for path, name, content in (
        (README, "speed", readme_text(runs, rows)),
        (PERFORMANCE, "suites", performance_text(runs, rows)),
    ):
        text = (root / path).read_text(encoding="utf-8")
        wanted = replace_between(text, name, content)
        if wanted != text:
            stale.append(path)
            if not check:
                (root / path).write_text(wanted, encoding="utf-8")
    series = plot_series(rows)
    device = ", ".join(dict.fromkeys(run["device"] for run in runs))
    mark = plot_mark(series, device)
    plot = root / PLOT
    if not plot.exists() or mark not in plot.read_text(encoding="utf-8"):
        stale.append(PLOT)
        if not check:
            plot.parent.mkdir(parents=True, exist_ok=True)
            plot.write_text(draw(series, device, mark), encoding="utf-8")
    return stale


def main(arguments: Sequence[str] | None = None, root: Path = ROOT) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="change nothing; exit status 1 if a file is out of date")
    check = parser.parse_args(arguments).check
    stale = update(root, check=check)
    for path in stale:
        print(f"{path}: {'out of date: run python benchmarks/update_docs.py' if check else 'written'}")
    return int(check and bool(stale))


if __name__ == "__main__":
    sys.exit(main())
