"""``flashdwc bench``: progress on the screen, rows on the disk, a report at the end."""

from __future__ import annotations

from contextlib import closing

from . import runner
from .friendly import output_folder, require
from .plots import geometric_mean
from .report import SLOWER, write_report
from .results import Row


def run(options: runner.Options) -> int:
    """Runs the benchmark. Interrupted, it still writes the report of the rows it has, and returns 130."""
    runner.check(options)
    jobs = runner.plan(options)
    require("matplotlib")
    progress_module = require("rich.progress")
    folder = output_folder(options.out)
    columns = (
        "{task.description}",
        progress_module.BarColumn(),
        progress_module.MofNCompleteColumn(),
        progress_module.TimeRemainingColumn(),
    )
    rows: list[Row] = []
    interrupted = False
    with progress_module.Progress(*columns, transient=True) as progress:
        task = progress.add_task("measuring the machine's ceilings", total=len(jobs))
        writer, ceilings = runner.open_run(options, folder)
        with closing(writer):
            try:
                compiling = progress.add_task("compiling kernels", total=None)
                for spec in runner.prepare(jobs, options):
                    progress.update(compiling, description=f"compiling kernels: {spec}")
                progress.remove_task(compiling)
                for job in jobs:
                    progress.update(task, description=f"{job.suite} {job.case.spec} {job.dtype} {job.direction}")
                    for row in runner.measure(job, options, ceilings):
                        writer.add(row)
                        rows.append(row)
                    progress.advance(task)
            except KeyboardInterrupt:
                interrupted = True
    report = write_report(folder, writer.header, ceilings, rows)
    _print_summary(rows)
    print(f"report: {report}")
    if interrupted:
        print(f"interrupted after {len(rows)} rows")
        return 130
    return 0


def _print_summary(rows: list[Row]) -> None:
    """One line per suite and direction."""
    for suite, direction in dict.fromkeys((row.suite, row.direction) for row in rows):
        own = [row for row in rows if (row.suite, row.direction) == (suite, direction)]
        ratios = [row.ratio for row in own if row.ratio is not None]
        line = f"{suite:8} {direction:12} {sum(row.status == 'ok' for row in own):5} rows"
        if ratios:
            slower = sum(ratio < SLOWER for ratio in ratios)
            line += f"  {geometric_mean(ratios):6.2f}x geometric mean, {min(ratios):.2f}x to {max(ratios):.2f}x"
            line += f", {slower} below {SLOWER}x" if slower else ""
        for status in ("skipped", "failed"):
            if count := sum(row.status == status for row in own):
                line += f", {count} {status}"
        print(line)
