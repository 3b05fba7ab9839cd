"""What all tests share: one thread, a fixed seed for each test, devices, a kernel cache of their own."""

from __future__ import annotations

import fcntl
import gc
import os
import tempfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

_CACHE = tempfile.TemporaryDirectory(prefix="flashdwc-tests-")
os.environ["FLASHDWC_CACHE_DIR"] = _CACHE.name  # before the package reads it; subprocesses inherit it

import hypothesis  # noqa: E402
import pytest  # noqa: E402
import torch  # noqa: E402
from support import preferring  # noqa: E402

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


@pytest.fixture
def prefer() -> Iterator[Callable[[str], None]]:
    """``prefer(family)``: as :func:`support.preferring`, to the end of the test."""
    with ExitStack() as stack:
        yield lambda family: stack.enter_context(preferring(family))


@pytest.fixture
def many_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planes whose rows are not aligned exchange outputs even where they are few."""
    from flashdwc.kernels.cuda import depthwise_planar

    monkeypatch.setattr(depthwise_planar, "ENOUGH_WRITES", 0)
