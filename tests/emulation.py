"""Runs CUDA kernels on the CPU: a launcher in place of the GPU's, and a stage on which the planners take CPU tensors for CUDA's."""

from __future__ import annotations

import ctypes
import hashlib
import re
import shutil
import struct
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import lru_cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from flashdwc.core import jit
from flashdwc.kernels.cuda import depthwise_tensor_core

HERE = Path(__file__).parent / "emulator"
COMPILER = shutil.which("g++")
FLAGS = (
    "-std=c++20 -O1 -fno-strict-aliasing -w "
    "-fsanitize=address,alignment,bounds,integer-divide-by-zero -fno-sanitize-recover=all"
)


def kernel_source(path: Path) -> str:
    """A source of the package as the host compiler understands it."""
    text = path.read_text()
    text = text.replace(
        "extern __shared__ __align__(128) u16 shared[];", "u16* shared = reinterpret_cast<u16*>(emulator::shared);"
    )
    store = "if (inside(0)) *reinterpret_cast<uint4*>(p) = v.quad;"
    return re.sub(r'asm volatile\("\{\.reg \.pred inside;.*?"memory"\);', store, text, flags=re.DOTALL)


@lru_cache(maxsize=1)
def _folder() -> tempfile.TemporaryDirectory:
    folder = tempfile.TemporaryDirectory(prefix="flashdwc-emulator-")
    for path in jit.SOURCES.glob("*.cu*"):
        (Path(folder.name) / path.name).write_text(kernel_source(path))
    shutil.copy(HERE / "host.cuh", Path(folder.name) / "mma.cuh")
    return folder


def _program(name: str, macros: Mapping[str, int]) -> Path:
    lines = ['#include "cuda.h"', *(f"#define {macro} {int(value)}" for macro, value in sorted(macros.items()))]
    lines += [f"#define KERNEL {name}", f'#include "{name}.cu"', '#include "main.inc"']
    source = "\n".join(lines) + "\n"
    program = Path(_folder().name) / f"{name}-{hashlib.sha256(source.encode()).hexdigest()[:16]}"
    if not program.exists():
        program.with_suffix(".cpp").write_text(source)
        command = [
            COMPILER,
            *FLAGS.split(),
            f"-I{HERE}",
            f"-I{_folder().name}",
            program.with_suffix(".cpp"),
            "-o",
            program,
        ]
        result = subprocess.run(command, capture_output=True, text=True)
        assert result.returncode == 0, result.stderr[:4000]
    return program


class Launcher:
    """As :class:`flashdwc.core.jit.Launcher`; the addresses it is called with must lie in tensors of ``known``."""

    known: list[Tensor] = []
    launched: list[tuple[str, dict]] = []

    def __init__(
        self,
        name: str,
        macros: Mapping[str, int],
        device: torch.device,
        *,
        blocks: int,
        threads: int,
        shared_bytes: int,
        layout: str,
        values: Sequence[int],
        pointers: Sequence[int],
    ) -> None:
        self.program, self.pointers, self.grid = _program(name, macros), pointers, (blocks, threads, shared_bytes)
        blob = struct.pack(layout, *values)
        self.words = blob.ljust(-(-len(blob) // 8) * 8, b"\0")
        self.launched.append((name, dict(macros)))

    def __call__(self, *addresses: int) -> None:
        storages = {t.untyped_storage().data_ptr(): t.untyped_storage() for t in self.known}
        order = list(storages)

        def place(address: int) -> tuple[int, int]:
            for i, start in enumerate(order):
                if start <= address < start + storages[start].nbytes():
                    return i, address - start
            raise AssertionError(f"address {address} lies in no known tensor")

        def number(value: int) -> bytes:
            return struct.pack("=Q", value)

        given = [(p, *place(a)) for p, a in zip(self.pointers, addresses, strict=True) if a]
        parts = [number(len(order))]
        for start in order:
            parts += [number(storages[start].nbytes()), ctypes.string_at(start, storages[start].nbytes())]
        parts += [number(len(self.words) // 8), self.words, number(len(given))]
        parts += [number(n) for triple in given for n in triple]
        parts += [number(n) for n in self.grid]
        with tempfile.NamedTemporaryFile() as file:
            file.write(b"".join(parts))
            file.flush()
            result = subprocess.run([self.program, file.name], capture_output=True, text=True)
            assert result.returncode == 0, result.stderr[:4000]
            file.seek(0)
            for start in order:
                ctypes.memmove(start, file.read(storages[start].nbytes()), storages[start].nbytes())


@contextmanager
def emulated_gpu(*operands: Tensor, capability: tuple[int, int] = (9, 0), multiprocessors: int = 4) -> Iterator[type]:
    """A stage for the planners of the CUDA backends: a small GPU whose memory is the CPU's. Yields the launcher's class."""
    Launcher.known, Launcher.launched = [*operands], []
    _folder()  # made once, before threads could make two

    def empty_strided(size: Any, strides: Any, dtype: torch.dtype) -> Tensor:
        t = torch.empty_strided(size, strides, dtype=dtype).fill_(torch.nan)
        Launcher.known.append(t)
        return t

    properties = SimpleNamespace(name="emulated", multi_processor_count=multiprocessors)
    with ExitStack() as stack:
        for where, name, what in (
            (jit, "Launcher", Launcher),
            (depthwise_tensor_core, "empty_strided", empty_strided),
            (torch.cuda, "get_device_capability", lambda *_: capability),
            (torch.cuda, "get_device_properties", lambda *_: properties),
            (torch._C, "_cuda_getDevice", lambda: None),
        ):
            stack.enter_context(patch.object(where, name, what, create=True))
        yield Launcher
