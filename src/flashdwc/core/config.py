"""All settings, read from the environment once, at import.

| variable             | default                  | meaning                                                    |
|----------------------|--------------------------|------------------------------------------------------------|
| FLASHDWC_CACHE_DIR   | XDG cache dir + flashdwc | where compiled kernels are kept                            |
| FLASHDWC_IMPL        | auto                     | what ``impl="auto"`` means: auto, cuda, cpu or torch       |
| FLASHDWC_VERBOSE     | 0                        | 1 logs every kernel that is compiled                       |
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from .errors import SettingError

IMPLEMENTATIONS = ("auto", "cuda", "cpu", "torch")


@dataclass(frozen=True)
class Config:
    cache_dir: Path
    named_impl: str
    verbose: bool

    @classmethod
    def from_environment(cls) -> Config:
        named_impl, verbose = os.environ.get("FLASHDWC_IMPL", "auto"), os.environ.get("FLASHDWC_VERBOSE", "0")
        return cls(cache_dir=_cache_dir(), named_impl=named_impl, verbose=verbose == "1")

    @property
    def impl(self) -> str:
        """Checked where it is asked for, so that a wrong one does not keep the package from being imported."""
        if self.named_impl not in IMPLEMENTATIONS:
            raise SettingError(f"FLASHDWC_IMPL: expected one of {', '.join(IMPLEMENTATIONS)}, got {self.named_impl!r}")
        return self.named_impl


def _cache_dir() -> Path:
    if chosen := os.environ.get("FLASHDWC_CACHE_DIR"):
        return Path(chosen)
    base = os.environ.get("XDG_CACHE_HOME")
    try:
        return (Path(base) if base else Path.home() / ".cache") / "flashdwc"
    except RuntimeError:  # no home directory
        import tempfile

        return Path(tempfile.gettempdir()) / "flashdwc"


config = Config.from_environment()
