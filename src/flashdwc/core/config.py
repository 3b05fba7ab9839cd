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

IMPLEMENTATIONS = ("auto", "cuda", "cpu", "torch")


@dataclass(frozen=True)
class Config:
    cache_dir: Path
    impl: str
    verbose: bool

    @classmethod
    def from_environment(cls) -> Config:
        impl = os.environ.get("FLASHDWC_IMPL", "auto")
        if impl not in IMPLEMENTATIONS:
            raise ValueError(f"FLASHDWC_IMPL: expected one of {', '.join(IMPLEMENTATIONS)}, got {impl!r}")
        return cls(cache_dir=_cache_dir(), impl=impl, verbose=os.environ.get("FLASHDWC_VERBOSE", "0") == "1")


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
