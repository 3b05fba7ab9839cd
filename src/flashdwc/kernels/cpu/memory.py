"""Keeps the memory of temporary tensors in the process."""

from __future__ import annotations

import sys
from functools import lru_cache

import torch

_BLOCK = 31 << 20  # bytes: glibc learns from blocks of up to 32 MiB


@lru_cache(maxsize=1)
def keep_temporaries() -> None:
    """Lets glibc keep what it would give back to the system after every call, to fault it in again in the next.

    In a young process it does so with all blocks above 128 KiB, which makes small calls two to three times slower. Once a
    larger block was freed, it keeps blocks up to that size; in most processes this happens sooner or later. The block here
    is never touched, so it costs no memory.
    """
    if sys.platform == "linux":
        torch.UntypedStorage(_BLOCK)
