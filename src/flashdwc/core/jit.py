"""CUDA C++ at run time: NVRTC through ``cuda.core``, a cache on disk, and launches on PyTorch's current stream.

A build is the source, the macros that specialise it, the compiler and the architecture; its hash names the cache entry, which
holds a checksum, so that a damaged entry is compiled again. The source with its macros is kept beside it.

What is in the cache is loaded and launched by the driver, through ctypes: NVRTC and ``cuda.core``, which take seconds to load
from a cold disk, are not touched.
"""

from __future__ import annotations

import ctypes
import hashlib
import io
import logging
import os
import struct
import tempfile
import threading
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from .config import config
from .errors import CacheWarning, CaptureError, CompileError, LaunchError
from .files import replace_file

SOURCES = Path(__file__).parent.parent / "kernels" / "cuda"
COMPILER = ("cuda-core", "cuda-bindings", "nvidia-cuda-nvrtc", "nvidia-cuda-nvrtc-cu12")  # packages
ARCHITECTURES = ("sm_80", "sm_86", "sm_89", "sm_90a", "sm_100", "sm_120")  # what the sources are tested for

logger = logging.getLogger("flashdwc")
_lock = threading.RLock()
_kernels: dict[tuple[str, int], int] = {}  # handles, by source and device
_warned_about_cache = False

if hasattr(os, "register_at_fork"):  # a child forked while another thread compiled must not wait for that thread

    def _renew_lock() -> None:
        global _lock
        _lock = threading.RLock()

    os.register_at_fork(after_in_child=_renew_lock)


@lru_cache(maxsize=1)
def why_unavailable() -> str | None:
    """Why no kernel can be compiled here; None if one can."""
    if find_spec("cuda") is None or find_spec("cuda.core") is None:
        return "the package cuda-core is not installed: pip install 'cuda-core[cu13]'"
    try:
        _cuda_core()
    except Exception as error:  # a broken installation may raise anything
        found = compiler_version() or "cuda-core"
        return f"{found} do not load ({error}): pip install --force-reinstall 'cuda-core[cu13]'"
    return None


@lru_cache(maxsize=1)
def _cuda_core() -> Any:
    """The module, imported by one thread at a time: two at once see it half made."""
    with _lock:
        import cuda.core

        return cuda.core


@lru_cache(maxsize=32)
def architecture(device: torch.device) -> str:
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}" + ("a" if (major, minor) == (9, 0) else "")


@lru_cache(maxsize=1)
def _sources_digest() -> str:
    digest = hashlib.sha256()
    for path in sorted(SOURCES.glob("*.cu*")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


@lru_cache(maxsize=1)
def compiler_version() -> str:
    """Of the packages that compile; NVRTC itself would have to be loaded to be asked."""
    versions = []
    for package in COMPILER:
        with suppress(metadata.PackageNotFoundError):
            versions.append(f"{package} {metadata.version(package)}")
    return ", ".join(versions)


def _full_source(name: str, macros: Mapping[str, int]) -> str:
    lines = [f"#define {macro} {int(value)}" for macro, value in sorted(macros.items())]
    return "\n".join(lines) + f'\n#include "{name}.cu"\n'


def _key(source: str, arch: str) -> str:
    parts = (source, _sources_digest(), compiler_version(), arch)
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]


def compile_source(source: str, name: str, arch: str, verbose: bool = False) -> tuple[bytes, str]:
    """Compiles to a cubin; returns it with the compiler's log (``verbose`` adds registers and spills to it)."""
    core = _cuda_core()
    log = io.StringIO()
    options = core.ProgramOptions(
        name=f"{name}_specialised.cu",
        arch=arch,
        std="c++17",
        include_path=str(SOURCES),
        ptxas_options=["-v"] if verbose else None,
    )
    try:
        program = core.Program(source, "c++", options)
        return bytes(program.compile("cubin", logs=log).code), log.getvalue()
    except Exception as error:
        path = _keep_source(source, name)
        raise CompileError(f"{name} for {arch} did not compile; source: {path}\n{log.getvalue()}\n{error}") from error


def _keep_source(source: str, name: str) -> str:
    handle, path = tempfile.mkstemp(prefix=f"flashdwc-{name}-", suffix=".cu")
    with os.fdopen(handle, "w") as file:
        file.write(source)
    return path


def build(name: str, macros: Mapping[str, int], arch: str) -> bytes:
    """The cubin of a kernel, from the cache on disk or from the compiler."""
    source = _full_source(name, macros)
    path = config.cache_dir / f"{name}-{arch}-{_key(source, arch)}.cubin"
    cubin = _read_entry(path)
    if cubin is None:
        if config.verbose:
            logger.warning("compiling %s for %s: %s", name, arch, dict(macros))
        cubin, _ = compile_source(source, name, arch)
        _write_entry(path, cubin, source)
    return cubin


def _read_entry(path: Path) -> bytes | None:
    try:
        entry = path.read_bytes()
    except OSError:
        return None
    checksum, cubin = entry[:32], entry[32:]
    return cubin if hashlib.sha256(cubin).digest() == checksum else None


def _write_entry(path: Path, cubin: bytes, source: str) -> None:
    global _warned_about_cache
    try:
        replace_file(path.with_suffix(".cu"), source.encode())
        replace_file(path, hashlib.sha256(cubin).digest() + cubin)
    except OSError as error:
        if not _warned_about_cache:
            _warned_about_cache = True
            warnings.warn(
                f"the kernel cache {path.parent} cannot be written ({error}); kernels are compiled anew in each process. "
                "FLASHDWC_CACHE_DIR names another place.",
                CacheWarning,
                stacklevel=2,
            )


def load(name: str, macros: Mapping[str, int], device: torch.device, shared_bytes: int) -> int:
    """Handle of the function ``name`` on a device, compiled and loaded where it is not yet."""
    key = (_full_source(name, macros), device.index or 0)
    if key not in _kernels:
        if torch.cuda.is_current_stream_capturing():
            raise CaptureError(
                f"{name} would have to be compiled during the capture of a CUDA graph: call it once with these shapes first"
            )
        cubin = build(name, macros, architecture(device))  # not under the lock: threads compile side by side
        with _lock, torch.cuda.device(device):
            if key not in _kernels:
                _kernels[key] = _load_cubin(name, cubin, device, shared_bytes)
    return _kernels[key]


def _load_cubin(name: str, cubin: bytes, device: torch.device, shared_bytes: int) -> int:
    """Handle of the function, which stays loaded as long as the process."""
    torch.cuda.current_stream().query()  # makes the device's context current in this thread
    driver = _driver()
    library, kernel, function = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_void_p()
    code = driver.cuLibraryLoadData(ctypes.byref(library), cubin, None, None, 0, None, None, 0)
    code = code or driver.cuLibraryGetKernel(ctypes.byref(kernel), library, name.encode())
    code = code or driver.cuKernelSetAttribute(_MAX_DYNAMIC_SHARED_SIZE_BYTES, shared_bytes, kernel, device.index or 0)
    # a function of this context: a launch by the kernel's handle looks it up each time
    code = code or driver.cuKernelGetFunction(ctypes.byref(function), kernel)
    if code or function.value is None:
        capability = torch.cuda.get_device_capability(device)
        raise LaunchError(
            f"{name}, {shared_bytes} bytes of shared memory: not loaded on {device}, capability {capability}: CUDA error {code}"
        )
    return function.value


@lru_cache(maxsize=1)
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("nvcuda.dll" if os.name == "nt" else "libcuda.so.1")


_MAX_DYNAMIC_SHARED_SIZE_BYTES = 8  # of CUfunction_attribute
_INVALID_CONTEXT = 201  # of CUresult

# struct CUlaunchConfig: grid, block, shared memory; stream; attributes, their number
_CONFIG_WORDS, _STREAM_WORD = 7, 4


class Launcher:
    """A kernel with its grid and its one struct of parameters, ready to run with other pointers.

    ``layout`` is the struct's format; ``pointers`` are the positions in it, in 8-byte words, that a call fills in.
    ``cuLaunchKernelEx`` is called through ctypes with ready arguments: a third of the host time of ``cuda.core.launch``.
    """

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
        self._launch = _driver().cuLaunchKernelEx
        self._name, self._device, self._index = name, device, device.index
        self._handle = ctypes.c_void_p(load(name, macros, device, shared_bytes))
        config = struct.pack("=7I4x3q", blocks, 1, 1, threads, 1, 1, shared_bytes, 0, 0, 0)
        self._start = config + struct.pack(layout, *values)
        self._pointers = tuple(_CONFIG_WORDS + position for position in pointers)
        self._free: list[tuple] = []  # buffers and arguments that no thread is using

    def __call__(self, *addresses: int) -> None:
        """Launches on the current stream of the device, which must be the current one."""
        try:
            buffer = self._free.pop()
        except IndexError:
            buffer = self._new_buffer()
        words, arguments, _ = buffer
        for position, address in zip(self._pointers, addresses):
            words[position] = address
        words[_STREAM_WORD] = torch._C._cuda_getCurrentRawStream(self._index)
        code = self._launch(*arguments)
        if code:
            code = self._launch_again(code, arguments)
        self._free.append(buffer)
        if code:
            capability = torch.cuda.get_device_capability(self._device)
            raise LaunchError(
                f"{self._name}: launch refused on {self._device}, capability {capability}: CUDA error {code}"
            )

    def _new_buffer(self) -> tuple:
        size = (len(self._start) + 7) // 8
        words = (ctypes.c_int64 * size).from_buffer_copy(self._start.ljust(size * 8, b"\0"))
        config = ctypes.addressof(words)
        pointer = (ctypes.c_void_p * 1)(config + 8 * _CONFIG_WORDS)
        arguments = ctypes.c_void_p(config), self._handle, ctypes.c_void_p(ctypes.addressof(pointer)), None
        return words, arguments, pointer

    def _launch_again(self, code: int, arguments: tuple) -> int:
        """Where a thread has not used the device yet, it has no context: gives it PyTorch's and tries once more."""
        if code != _INVALID_CONTEXT:
            return code
        driver, context = _driver(), ctypes.c_void_p()
        driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), self._index)
        driver.cuCtxSetCurrent(context)
        driver.cuDevicePrimaryCtxRelease_v2(self._index)  # PyTorch holds it
        return self._launch(*arguments)
