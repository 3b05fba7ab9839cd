"""Rows of a benchmark run and the files that keep them: each row is on disk before the next is measured."""

from __future__ import annotations

import csv
import json
import os
import platform
import subprocess
from dataclasses import asdict, dataclass, field, fields
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, TextIO

import torch

from .friendly import os_error
from .timers import Ceilings

BASELINES = ("torch_channels_last", "torch_contiguous", "compile_channels_last", "compile_contiguous")


@dataclass
class Row:
    """One measurement: a layer, a dtype, a layout, a direction. Times in milliseconds, None where not measured."""

    suite: str
    case: str
    shape: str
    n: int
    c: int
    h: int
    w: int
    kh: int
    kw: int
    stride: int
    dilation: int
    multiplier: int
    dtype: str
    layout: str
    direction: str
    status: str = "ok"  # ok, skipped (with a reason) or failed (with the error)
    reason: str = ""
    backend: str = ""  # what explain says runs
    backend_detail: str = ""
    backend_reason: str = ""
    ms: float | None = None
    p20: float | None = None
    p80: float | None = None
    samples: int = 0
    timing: str = "eager"  # or cuda_graph
    tflops: float | None = None
    gbytes: float | None = None  # GB/s of compulsory traffic
    floor_ms: float | None = None
    floor_bound: str = ""  # memory or compute
    floor_fraction: float | None = None  # floor_ms / ms
    best_baseline: str = ""
    best_baseline_ms: float | None = None
    ratio: float | None = None  # best baseline / ours: above 1 is faster
    ratio_same_layout: float | None = None  # the same with baselines in this row's layout alone
    max_difference: float | None = None  # from PyTorch's result, relative to its largest value
    baselines: dict[str, dict[str, float]] = field(default_factory=dict)  # name: median, p20, p80, samples
    baseline_errors: dict[str, str] = field(default_factory=dict)  # of the baselines that could not run

    def flat(self) -> dict[str, Any]:
        row = asdict(self)
        measured = row.pop("baselines")
        row.pop("baseline_errors")
        for name in BASELINES:
            row[f"{name}_ms"] = measured.get(name, {}).get("median")
        return row


CSV_COLUMNS = [f.name for f in fields(Row) if not f.name.startswith("baseline")] + [f"{name}_ms" for name in BASELINES]


def environment(device: torch.device) -> dict[str, Any]:
    """Everything a reader needs to judge the numbers or to repeat them."""
    from flashdwc import __version__

    return {
        "device": device_name(device),
        "device_type": device.type,
        "cpu": cpu_name(),
        "cpu_threads": torch.get_num_threads(),
        "platform": platform.platform(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda if device.type == "cuda" else None,
        "cudnn": torch.backends.cudnn.version() if device.type == "cuda" else None,
        "flashdwc": __version__,
        "commit": git_commit(),
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else cpu_name()


def cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def git_commit() -> str | None:
    """The commit of the checkout that this package runs from, with ``+`` where files differ; None outside one."""
    here = Path(__file__).resolve().parent

    def git(*arguments: str) -> str:
        return subprocess.run(
            ["git", "-C", str(here), *arguments], capture_output=True, text=True, timeout=10, check=True
        ).stdout.strip()

    try:
        git("ls-files", "--error-unmatch", "results.py")  # fails for an installed copy inside another repository
        return git("rev-parse", "HEAD") + ("+" if git("status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.SubprocessError):
        return None


class Writer:
    """Appends rows to ``results.csv`` and ``results.json``; both are whole, readable files after every row."""

    def __init__(self, folder: Path, run: dict[str, Any], ceilings: Ceilings) -> None:
        self.folder = folder
        self.header = {**run, "ceilings": asdict(ceilings)}
        self.count = 0

        try:
            self._csv = (self.folder / "results.csv").open("w", newline="", encoding="utf-8")
            self._json: TextIO = (self.folder / "results.json").open("w", encoding="utf-8")
            self._rows = csv.DictWriter(self._csv, CSV_COLUMNS)
            self._rows.writeheader()
            self._json.write(f'{{"run": {json.dumps(self.header, indent=1)},\n"rows": [')
            self._close_json()
        except OSError as error:
            raise os_error("write", error) from error

    def add(self, row: Row) -> None:
        try:
            self._rows.writerow(row.flat())
            self._csv.flush()
            self._json.seek(self._tail)
            self._json.write(("," if self.count else "") + "\n" + json.dumps(asdict(row)))
            self._close_json()
        except OSError as error:
            raise os_error("write", error) from error
        self.count += 1

    def _close_json(self) -> None:
        """Ends the file as valid JSON; the next row overwrites this end."""
        self._json.flush()
        self._tail = self._json.tell()
        self._json.write("\n]}\n")
        self._json.flush()

    def close(self) -> None:
        try:
            self._csv.close()
            self._json.close()
        except OSError as error:
            raise os_error("write", error) from error


def available_memory(device: torch.device) -> int:
    """Bytes that can still be allocated on a device."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    try:
        for line in Path("/proc/meminfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("MemAvailable"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    except (AttributeError, ValueError, OSError):
        return 1 << 62
