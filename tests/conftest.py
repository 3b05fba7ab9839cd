"""What all tests share: one thread, a fixed seed for each test, devices, a kernel cache of their own."""

from __future__ import annotations

import fcntl
import gc
import os
import tempfile
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

_CACHE = tempfile.TemporaryDirectory(prefix="flashdwc-tests-")
os.environ["FLASHDWC_CACHE_DIR"] = _CACHE.name  # before the package reads it; subprocesses inherit it

import hypothesis  # noqa: E402
import pytest  # noqa: E402
import torch  # noqa: E402

torch.set_num_threads(1)  # OpenMP threads that spin for each other make shared machines crawl
hypothesis.settings.register_profile("tests", deadline=None, database=None, print_blob=True)
hypothesis.settings.load_profile("tests")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))


@pytest.fixture(autouse=True)
def fixed_seed(request: pytest.FixtureRequest) -> None:
    torch.manual_seed(zlib.crc32(request.node.nodeid.encode()))


@pytest.fixture(autouse=True)
def exact_and_repeatable_cudnn() -> Iterator[None]:
    """PyTorch's own kernels, where they run, without TF32 and without atomics."""
    with torch.backends.cudnn.flags(enabled=True, benchmark=False, deterministic=True, allow_tf32=False):
        yield


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> torch.device:
    return torch.device(request.param)


@pytest.fixture(
    params=[
        pytest.param(("cpu", torch.float32), id="cpu-float32"),
        pytest.param(("cuda", torch.float32), id="cuda-float32", marks=pytest.mark.gpu),
        pytest.param(("cuda", torch.float16), id="cuda-float16", marks=pytest.mark.gpu),
    ]
)
def place(request: pytest.FixtureRequest) -> dict:
    """Keyword arguments of a tensor: device and dtype, one for each kernel that differs."""
    device, dtype = request.param
    return {"device": device, "dtype": dtype}


@pytest.fixture
def much_gpu_memory() -> Iterator[None]:
    """One test at a time, of all that share the machine, and nothing kept behind."""
    with (Path(tempfile.gettempdir()) / "flashdwc-tests.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        torch.cuda.empty_cache()
        yield
        gc.collect()
        torch.cuda.empty_cache()


def _changed(
    monkeypatch: pytest.MonkeyPatch, limits: Sequence[tuple[Any, str]], choices: Sequence[Any]
) -> Iterator[None]:
    """Limits of planners are 0; choices made under others are forgotten."""
    for module, limit in limits:
        monkeypatch.setattr(module, limit, 0)
    for choice in choices:
        choice.cache_clear()
    yield
    for choice in choices:
        choice.cache_clear()


@pytest.fixture
def small_is_large(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The CUDA kernels for large problems take small ones too."""
    from flashdwc.kernels.cuda import depthwise_maps, depthwise_pairs, depthwise_planar, depthwise_stream

    choices = depthwise_pairs.conv_pairs, depthwise_stream.conv_stream
    choices += depthwise_maps.conv_maps, depthwise_maps.weight_grad_maps
    limits = [(module, "ENOUGH_OUTPUTS") for module in (depthwise_maps, depthwise_pairs, depthwise_stream)]
    yield from _changed(monkeypatch, [*limits, (depthwise_planar, "ENOUGH_WRITES")], choices)


@pytest.fixture
def octets_and_warps(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The CUDA kernels that no rule chooses are chosen where they can be."""
    from flashdwc.kernels.cuda import depthwise_octets, depthwise_warps

    choices = depthwise_octets.conv_octets, depthwise_octets.weight_grad_octets
    choices += depthwise_warps.conv_warps, depthwise_warps.weight_grad_warps
    limits = [(module, "ENOUGH_OUTPUTS") for module in (depthwise_octets, depthwise_warps)]
    yield from _changed(monkeypatch, limits, choices)
