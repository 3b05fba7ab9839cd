"""Measured choices: where a backend knows several ways to compute a call, which one was the fastest on a device.

Rules choose among the ways where nothing was measured. A choice is the name of a way, kept by the name of the problem that it was measured
on: in a table of the package for known GPUs, and in a file beside the compiled kernels for what ``flashdwc warmup --tune`` has measured here,
which counts more. A choice that is no way any more, as kernels change, is ignored.
"""

from __future__ import annotations

import json
import re
import threading
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import torch

from .config import config
from .errors import CacheWarning
from .files import replace_file

TABLES = Path(__file__).parent.parent / "kernels" / "tuned"
_lock = threading.Lock()


@dataclass(frozen=True)
class Alternative:
    """One way to compute a call."""

    name: str  # the same in every process
    plan: Callable[[], Callable]  # as ``Backend.plan``


@dataclass(frozen=True)
class Alternatives:
    problem: str  # the name under which the choice is kept
    chosen: str  # what runs now
    ways: tuple[Alternative, ...]


def choice(device: torch.device, problem: str) -> str | None:
    """The way that was measured to be the fastest for a problem; None where nothing was."""
    return _choices(torch.cuda.get_device_properties(device).name).get(problem)


def keep(device: torch.device, choices: Mapping[str, str]) -> Path:
    """Adds choices to the file of this machine and returns its path; they hold at once, in this process and in new ones.

    ``OSError`` where it cannot be written.
    """
    gpu = torch.cuda.get_device_properties(device).name
    path = own_file(gpu)
    with _lock:
        content = json.dumps({"gpu": gpu, "choices": {**_read(path), **choices}}, indent=1, sort_keys=True)
        replace_file(path, f"{content}\n".encode())
        _choices.cache_clear()
    return path


def own_file(gpu: str) -> Path:
    return config.cache_dir / "tuned" / _file_name(gpu)


def _file_name(gpu: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", gpu.lower()).strip("-") + ".json"


@lru_cache(maxsize=16)
def _choices(gpu: str) -> dict[str, str]:
    return {**_read(TABLES / _file_name(gpu)), **_read(own_file(gpu))}


def _read(path: Path) -> dict[str, str]:
    try:
        choices = json.loads(path.read_text())["choices"]
        return {str(problem): str(way) for problem, way in choices.items()}
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        warnings.warn(
            f"measured choices in {path} are not readable and not used: {error!r}", CacheWarning, stacklevel=2
        )
        return {}
