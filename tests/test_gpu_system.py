"""Streams, threads, graphs, devices, the kernel cache and the cost of a call, on a GPU.

Where a docstring names an address, somebody reported there the fault that the test guards against.
"""

from __future__ import annotations

import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from support import channels_last, check_convolution, run_python
from torch import Tensor, nn

from flashdwc import CaptureError, depthwise_conv2d
from flashdwc.nn import DepthwiseConv2d

pytestmark = pytest.mark.gpu

HALF = {"device": "cuda", "dtype": torch.float16}


def randn(*size: int, **where) -> Tensor:
    return torch.randn(size, **{**HALF, **where})


# --- streams and graphs ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kernel", [3, 7])
def test_runs_on_the_current_stream(kernel):
    """Launches on the default stream read stale input. https://github.com/NVIDIA/cudnn-frontend/pull/483"""
    x, w = channels_last(randn(8, 8, 256, 256)), randn(8, 1, kernel, kernel).requires_grad_()

    def everything(x: Tensor) -> list[Tensor]:
        x = x.detach().requires_grad_()
        y = depthwise_conv2d(x, w, padding=kernel // 2, impl="cuda")
        return [y.detach(), *torch.autograd.grad(y, (x, w), torch.ones_like(y))]

    expected = everything(x)
    torch.cuda.synchronize()
    for _ in range(5):
        late = torch.zeros_like(x)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            torch.cuda._sleep(50_000_000)
            late.copy_(x)
            results = everything(late)
        torch.cuda.current_stream().wait_stream(stream)
        assert all(torch.equal(a, b) for a, b in zip(results, expected))


def test_a_new_kernel_inside_a_capture_is_refused():
    x, w = randn(1, 8, 17, 19), randn(8, 1, 11, 5)  # a specialisation of its own
    with pytest.raises(CaptureError, match="call it once"):
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            depthwise_conv2d(x, w, padding=(5, 2), impl="cuda")
    torch.cuda.synchronize()
    check_convolution(x, w, padding=(5, 2), impl="cuda")


def test_a_training_step_in_a_graph():
    model = nn.Sequential(DepthwiseConv2d(16, 16, 7, padding=3, groups=16), nn.ReLU()).to(**HALF)
    x = channels_last(randn(4, 16, 28, 28))

    def step() -> Tensor:
        loss = model(x).float().pow(2).mean()
        loss.backward()
        return loss

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            model.zero_grad()
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    model.zero_grad()
    with torch.cuda.graph(graph):
        loss = step()
    x.copy_(randn(4, 16, 28, 28))
    graph.replay()
    replayed = [loss.clone(), *(p.grad.clone() for p in model.parameters())]
    model.zero_grad()
    again = [step().detach(), *(p.grad for p in model.parameters())]
    torch.testing.assert_close(replayed, again, rtol=0, atol=0)


# --- threads and devices ---------------------------------------------------------------------------------------------


def in_thread(function) -> None:
    with ThreadPoolExecutor(1) as pool:
        pool.submit(function).result()


def test_first_use_in_another_thread():
    """A thread that has not used the device has no current context."""
    x, w = randn(2, 8, 21, 22), randn(8, 1, 5, 7)
    in_thread(lambda: check_convolution(x, w, padding=(2, 3), impl="cuda"))
    in_thread(lambda: depthwise_conv2d(x, w, padding=(2, 3), impl="cuda"))  # with the kernel loaded already
    run_python("""
        import threading, torch
        from flashdwc import depthwise_conv2d
        x, w = (torch.randn(size, device="cuda", dtype=torch.float16) for size in ((2, 8, 9, 9), (8, 1, 7, 7)))
        results = []
        for _ in range(2):
            thread = threading.Thread(target=lambda: results.append(depthwise_conv2d(x, w, padding=3, impl="cuda")))
            thread.start(), thread.join()
        assert torch.equal(*results) and results[0].isfinite().all()
    """)


def test_eight_threads_on_eight_streams():
    start = threading.Barrier(8)

    def hammer(i: int) -> None:
        generator = torch.Generator("cuda").manual_seed(i)
        start.wait()
        with torch.cuda.stream(torch.cuda.Stream()):
            for n in range(10):
                size, kernel = (1 + i % 3, 8 + i, 12 + n % 2, 16), 3 + 4 * ((i + n) % 2)
                x, g = (torch.randn(size, generator=generator, **HALF) for _ in range(2))
                w = torch.randn(size[1], 1, kernel, kernel, generator=generator, **HALF)
                check_convolution(x, w, None, g, padding=kernel // 2, impl="cuda")
            torch.cuda.current_stream().synchronize()

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(hammer, range(8)))


def test_eight_threads_meet_one_new_kernel():
    x, w = randn(2, 8, 23, 25), randn(8, 1, 7, 9)
    start = threading.Barrier(8)

    def call(_: int) -> Tensor:
        start.wait()
        y = depthwise_conv2d(x, w, padding=(3, 4), impl="cuda")
        torch.cuda.current_stream().synchronize()
        return y

    with ThreadPoolExecutor(8) as pool:
        first, *others = pool.map(call, range(8))
    assert all(torch.equal(first, y) for y in others)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_a_device_that_is_not_the_current_one():
    """Launches went to the current device. https://github.com/rosinality/stylegan2-pytorch/issues/44"""
    torch.cuda.set_device(0)

    def use(_: int) -> None:
        for dtype in (torch.float16, torch.float32):
            for device in ("cuda:1", "cuda:0"):
                x, w = (randn(*size, device=device, dtype=dtype) for size in ((2, 8, 16, 16), (8, 1, 7, 7)))
                check_convolution(x, w, padding=3)
                assert torch.cuda.current_device() == 0

    use(0)
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(use, range(8)))
    with pytest.raises(ValueError, match=r"weight: expected the device of input, cuda:1, got device cuda:0"):
        depthwise_conv2d(randn(2, 4, 9, 9, device="cuda:1"), randn(4, 1, 3, 3, device="cuda:0"))
    model = nn.DataParallel(DepthwiseConv2d(8, 8, 7, groups=8).to(**HALF), [0, 1])
    model(randn(8, 8, 9, 9)).float().sum().backward()
    assert model.module.weight.grad.isfinite().all()


def test_fork_after_use_on_the_gpu():
    """The parent's CUDA is lost to a child; its CPU work goes on. https://github.com/pytorch/pytorch/issues/40403"""
    run_python(
        """
        import os, torch
        from flashdwc import depthwise_conv2d
        torch.set_num_threads(1)
        w = torch.ones(8, 1, 7, 7)
        depthwise_conv2d(torch.ones(1, 8, 9, 9).cuda().half(), w.cuda().half())
        child = os.fork()
        if child == 0:
            os._exit(0 if (depthwise_conv2d(torch.ones(1, 8, 9, 9), w) == 49).all() else 1)
        assert os.waitpid(child, 0)[1] == 0
    """,
        timeout=60,
    )


# --- the kernel cache ------------------------------------------------------------------------------------------------

CALL = """
    import torch
    from flashdwc import depthwise_conv2d
    torch.manual_seed(0)
    x = torch.randn(2, 8, 9, 9, device="cuda", dtype=torch.float16, requires_grad=True)
    w = torch.randn(8, 1, 7, 7, device="cuda", dtype=torch.float16, requires_grad=True)
    y = depthwise_conv2d(x, w, padding=3, impl="cuda")
    y.backward(torch.ones_like(y))
    print(y.double().sum().item(), x.grad.double().sum().item(), w.grad.double().sum().item())
"""


def test_eight_processes_share_a_cold_cache(tmp_path):
    """Ranks raced for the entries. https://github.com/pytorch/pytorch/issues/173679"""
    with ThreadPoolExecutor(8) as pool:
        runs = list(pool.map(lambda _: run_python(CALL, FLASHDWC_CACHE_DIR=str(tmp_path)).stdout, range(8)))
    assert len(set(runs)) == 1
    assert {path.suffix for path in tmp_path.iterdir()} == {".cu", ".cubin"}


def test_an_unwritable_cache_costs_one_warning(tmp_path):
    """https://github.com/triton-lang/triton/issues/1509"""
    (tmp_path / "file").touch()
    expected = run_python(CALL).stdout
    result = run_python(CALL, FLASHDWC_CACHE_DIR=str(tmp_path / "file" / "cache"))
    assert result.stdout == expected
    assert result.stderr.count("CacheWarning") == 1


def test_a_damaged_cache_is_repaired(tmp_path):
    expected = run_python(CALL, FLASHDWC_CACHE_DIR=str(tmp_path)).stdout
    entries = {path: path.read_bytes() for path in tmp_path.glob("*.cubin")}
    assert entries
    for path, content in entries.items():
        path.write_bytes(content[: len(content) // 2])
    assert run_python(CALL, FLASHDWC_CACHE_DIR=str(tmp_path)).stdout == expected
    assert {path: path.read_bytes() for path in tmp_path.glob("*.cubin")} == entries


def test_first_calls_are_quick(tmp_path):
    """Cold caches took minutes. https://github.com/pytorch/pytorch/issues/173679"""

    def seconds() -> dict[str, float]:
        result = run_python(
            """
            import json, time, torch
            from flashdwc import depthwise_conv2d

            def first_call(kernel):
                x = torch.randn(1, 96, 56, 56, device="cuda", dtype=torch.float16)
                w = torch.randn(96, 1, kernel, kernel, device="cuda", dtype=torch.float16)
                torch.cuda.synchronize()
                start = time.perf_counter()
                depthwise_conv2d(x, w, padding=kernel // 2, impl="cuda")
                torch.cuda.synchronize()
                return time.perf_counter() - start

            torch.zeros(1, device="cuda").add_(1).item()
            print(json.dumps({"process": first_call(7), "shape": max(map(first_call, (9, 13, 31)))}))
        """,
            FLASHDWC_CACHE_DIR=str(tmp_path),
        )
        return json.loads(result.stdout)

    cold, warm = seconds(), seconds()
    assert cold["process"] < 4, cold  # loads the compiler as well
    assert cold["shape"] < 0.6, cold
    assert warm["process"] < 0.5, warm
    assert warm["shape"] < 0.02, warm
    assert any(Path(tmp_path).iterdir())


# --- the cost of a call ----------------------------------------------------------------------------------------------


def host_microseconds(*functions, rounds: int = 25, calls: int = 100) -> list[float]:
    """Best time of a call on the host, measured in turns, with the GPU's queue drained in between."""
    best = [float("inf")] * len(functions)
    for _ in range(rounds):
        for i, function in enumerate(functions):
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(calls):
                function()
            best[i] = min(best[i], (time.perf_counter() - start) / calls * 1e6)
    return best


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("recorded", [False, True])
def test_host_cost_of_a_call(recorded, memory_format):
    x = randn(1, 96, 56, 56).to(memory_format=memory_format).requires_grad_(recorded)
    w = randn(96, 1, 7, 7).requires_grad_(recorded)
    ours, theirs = host_microseconds(
        lambda: depthwise_conv2d(x, w, None, 1, 3, impl="cuda"), lambda: F.conv2d(x, w, None, 1, 3, 1, 96)
    )
    assert ours <= 1.5 * theirs, f"{ours:.1f} us against {theirs:.1f} us"
