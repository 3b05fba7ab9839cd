"""``flashdwc doctor``: what is here, what works, and why the rest does not."""

from __future__ import annotations

import os
import platform
import warnings
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch
import torch.nn.functional as F

from .. import __version__
from ..core.config import config
from ..ops import depthwise_conv2d
from ..ops.depthwise_operators import forward
from .results import cpu_name

PACKAGES = (
    "cuda-core", "cuda-bindings", "nvidia-cuda-nvrtc", "triton", "numpy",
    "matplotlib", "rich", "scikit-learn", "pillow", "timm", "torchvision",
)  # fmt: skip
SAMPLE = (2, 16, 14, 14)  # input of the test call, [N, C, H, W]
KERNEL = 7


def run() -> int:
    """Prints the findings; 0 if depthwise convolution works on at least one device."""
    for name, value in (*_system(), *_cache()):
        print(f"{name:<18} {value}")
    usable = False
    for device in _devices():
        for dtype in (torch.float32, torch.float16):
            for backend, problem in _backends(device, dtype):
                usable = usable or problem is None
                subject = f"{backend} on {device}, {str(dtype).removeprefix('torch.')}"
                print(f"{'backend':<18} {subject:<26} {'works' if problem is None else problem}")
    if not torch.cuda.is_available():
        print(f"{'backend':<18} {'cuda':<26} {_why_no_cuda()}")
    print(f"{'verdict':<18} {'usable' if usable else 'not usable: no backend works'}")
    return 0 if usable else 1


def _system() -> Iterator[tuple[str, str]]:
    yield "flashdwc", __version__
    yield "python", f"{platform.python_version()} on {platform.platform()}"
    cuda = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "built without CUDA"
    yield "torch", f"{torch.__version__}, {cuda}"
    for package in PACKAGES:
        try:
            yield package, version(package)
        except PackageNotFoundError:
            yield package, "not installed"
    yield "cpu", f"{cpu_name()}, {torch.get_num_threads()} threads"
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        memory = properties.total_memory / 1e9
        yield f"cuda:{index}", f"{properties.name}, sm_{properties.major}{properties.minor}, {memory:.0f} GB"


def _cache() -> Iterator[tuple[str, str]]:
    """Where compiled kernels are kept. Without a usable cache everything works, but compiles anew in each process."""
    folder = config.cache_dir
    yield "kernel cache", f"{folder}, {_writable(folder)}"
    files = [path for path in folder.rglob("*") if path.is_file()] if folder.is_dir() else []
    yield "cached", f"{len(files)} files, {sum(path.stat().st_size for path in files) / 1e6:.2f} MB"
    yield "FLASHDWC_IMPL", config.impl


def _writable(folder: Path) -> str:
    there = next((path for path in (folder, *folder.parents) if path.exists()), None)
    if there is None or not there.is_dir():
        return f"not usable: {there} is not a folder (kernels are kept in memory only)"
    if not os.access(there, os.W_OK | os.X_OK):
        return f"not writable: no permission in {there} (kernels are kept in memory only)"
    return "writable" if there == folder else "writable, not made yet"


def _devices() -> list[torch.device]:
    gpus = [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
    return [torch.device("cpu"), *gpus]


def _backends(device: torch.device, dtype: torch.dtype) -> Iterator[tuple[str, str | None]]:
    """Each backend that belongs to the device with what is wrong with it, None where it computes the right result."""
    x = torch.randn(SAMPLE, device=device).to(dtype)
    weight = torch.randn(SAMPLE[1], 1, KERNEL, KERNEL, device=device).to(dtype)
    for name in (backend.name for backend in forward.backends):
        if name in ("cpu", "cuda") and name != device.type:
            continue
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                error = _error(name, x, weight)
        except Exception as problem:  # noqa: BLE001, whatever breaks a backend is the finding
            yield name, (str(problem).strip().splitlines() or [type(problem).__name__])[0]
            continue
        yield name, None if error < 5e-3 else f"wrong result: relative error {error:.1e}"


def _error(impl: str, x: torch.Tensor, weight: torch.Tensor) -> float:
    """The largest relative error of output and both gradients against PyTorch in float64 on the CPU."""

    def results(call, x: torch.Tensor, weight: torch.Tensor) -> list[torch.Tensor]:
        operands = [t.detach().requires_grad_() for t in (x, weight)]
        y = call(*operands)
        return [y, *torch.autograd.grad(y.sum(), operands)]

    def ours(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return depthwise_conv2d(x, weight, None, 1, KERNEL // 2, impl=impl)

    def reference(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return F.conv2d(x, weight, None, 1, KERNEL // 2, 1, x.shape[1])

    got = results(ours, x, weight)
    expected = results(reference, x.cpu().double(), weight.cpu().double())
    return max(
        ((a.detach().cpu().double() - b).abs().max() / b.abs().max()).item() for a, b in zip(got, expected, strict=True)
    )


def _why_no_cuda() -> str:
    if torch.version.cuda is None:
        return "this PyTorch is built without CUDA"
    return "PyTorch sees no CUDA device: no GPU, no driver, or CUDA_VISIBLE_DEVICES hides it"
