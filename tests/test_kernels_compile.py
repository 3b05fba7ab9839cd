"""Every CUDA kernel compiles for every architecture, without spilling registers: NVRTC needs no GPU.

The kernels and their macros are those that the planners ask for when they are given tensors without memory and an
architecture's shared memory.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from flashdwc.core import jit
from flashdwc.kernels.cuda.depthwise_tensor_core import STATIC_BYTES
from flashdwc.kernels.reference import conv_output_size
from flashdwc.ops.depthwise_operators import forward, input_grad, weight_grad

pytestmark = pytest.mark.skipif(jit.why_unavailable() is not None, reason="cuda-core is not installed")

FILL_SHARED_MEMORY = {
    "depthwise_conv",
    "depthwise_weight_grad",
    "depthwise_transposed",
    "depthwise_transposed_weight_grad",
}
MULTIPROCESSORS = {"sm_80": 108, "sm_86": 84, "sm_89": 128, "sm_90a": 132, "sm_100": 148, "sm_120": 170}

# Images, channels, height, width, kernel, stride, padding, dilation, multiplier, layout.
CASES: dict[str, tuple] = {
    "3x3": (8, 64, 56, 56, (3, 3), 1, 1, 1, 1, "nhwc"),
    "3x3 stride 2": (8, 96, 57, 56, (3, 3), 2, 1, 1, 1, "nhwc"),
    "3x3 in turns": (128, 144, 56, 56, (3, 3), 2, 1, 1, 1, "nhwc"),
    "11x1": (8, 24, 28, 28, (11, 1), 1, (5, 0), 1, 1, "nhwc"),
    "3x3 large": (128, 256, 64, 64, (3, 3), 1, 1, 1, 1, "nhwc"),
    "5x5 large": (128, 128, 56, 56, (5, 5), 1, 2, 1, 1, "nhwc"),
    "7x7 of 32 columns": (128, 768, 32, 32, (7, 7), 1, 3, 1, 1, "nhwc"),
    "7x5 dilation 2, large": (128, 96, 56, 56, (7, 5), 1, (6, 4), 2, 1, "nhwc"),
    "3x3 odd channels": (2, 37, 20, 21, (3, 3), 1, 1, 1, 1, "nhwc"),
    "3x3 of single pixels": (8, 64, 1, 1, (3, 3), 1, 1, 1, 1, "nhwc"),
    "3x3 planes": (2, 64, 56, 56, (3, 3), 1, 1, 1, 1, "nchw"),
    "3x3 stride 3": (2, 32, 40, 40, (3, 3), 3, 1, 1, 1, "nhwc"),
    "3x5 stride 2x3": (2, 33, 10, 20, (3, 5), (2, 3), 1, 1, 1, "nhwc"),
    "1x1": (2, 32, 14, 14, (1, 1), 1, 0, 1, 1, "nhwc"),
    "5x5": (8, 240, 14, 14, (5, 5), 1, 2, 1, 1, "nhwc"),
    "5x5 stride 2": (8, 144, 28, 28, (5, 5), 2, 2, 1, 1, "nhwc"),
    "5x5 planes of odd width": (2, 33, 15, 15, (5, 5), 1, 2, 1, 1, "nchw"),
    "7x7": (128, 96, 56, 56, (7, 7), 1, 3, 1, 1, "nhwc"),
    "7x7 small map": (8, 768, 7, 7, (7, 7), 1, 3, 1, 1, "nhwc"),
    "3x3 maps": (128, 384, 14, 14, (3, 3), 1, 1, 1, 1, "nchw"),
    "3x3 maps of 28 columns": (128, 192, 28, 28, (3, 3), 1, 1, 1, 1, "nchw"),
    "3x3 planes of 160 columns": (128, 32, 160, 160, (3, 3), 1, 1, 1, 1, "nchw"),
    "3x3 maps of 112 columns": (128, 32, 112, 112, (3, 3), 1, 1, 1, 1, "nchw"),
    "3x3 maps of 56 columns": (128, 144, 56, 56, (3, 3), 1, 1, 1, 1, "nchw"),
    "3x3 few maps of 28 columns": (8, 24, 28, 28, (3, 3), 1, 1, 1, 1, "nchw"),
    "3x3 maps stride 2": (128, 144, 56, 56, (3, 3), 2, 1, 1, 1, "nchw"),
    "5x5 maps of 56 columns, stride 2": (128, 72, 56, 56, (5, 5), 2, 2, 1, 1, "nchw"),
    "5x5 maps": (128, 480, 14, 14, (5, 5), 1, 2, 1, 1, "nchw"),
    "5x5 maps of 7 columns": (128, 1024, 7, 7, (5, 5), 1, 2, 1, 1, "nchw"),
    "5x5 maps stride 2": (128, 672, 14, 14, (5, 5), 2, 2, 1, 1, "nchw"),
    "7x7 maps": (8, 384, 14, 14, (7, 7), 1, 3, 1, 1, "nchw"),
    "7x7 maps of 7 columns": (128, 765, 7, 7, (7, 7), 1, 3, 1, 1, "nchw"),
    "7x7 planes": (8, 96, 56, 56, (7, 7), 1, 3, 1, 1, "nchw"),
    "7x7 stride 2": (8, 64, 56, 56, (7, 7), 2, 3, 1, 1, "nhwc"),
    "7x7 dilation 2": (8, 64, 56, 56, (7, 7), 1, 6, 2, 1, "nhwc"),
    "7x7 multiplier": (2, 8, 28, 28, (7, 7), 1, 3, 1, 4, "nhwc"),
    "13x13 octets of maps": (128, 128, 28, 28, (13, 13), 1, 6, 1, 1, "nhwc"),
    "7x7 octets of 14 columns": (128, 384, 14, 14, (7, 7), 1, 3, 1, 1, "nhwc"),
    "5x5 octets stride 2": (128, 128, 28, 28, (5, 5), 2, 2, 1, 1, "nhwc"),
    "13x13 warps of 14 columns": (8, 384, 14, 14, (13, 13), 1, 6, 1, 1, "nchw"),
    "7x7 warps": (128, 256, 64, 64, (7, 7), 1, 3, 1, 1, "nchw"),
    "13x13 warps": (128, 256, 64, 64, (13, 13), 1, 6, 1, 1, "nchw"),
    "17x17 warps": (128, 256, 56, 56, (17, 17), 1, 8, 1, 1, "nchw"),
    "31x31 warps": (128, 256, 64, 64, (31, 31), 1, 15, 1, 1, "nchw"),
    "5x5 warps stride 2": (128, 128, 56, 56, (5, 5), 2, 2, 1, 1, "nchw"),
    "9x9": (128, 256, 64, 64, (9, 9), 1, 4, 1, 1, "nhwc"),
    "11x11": (128, 256, 64, 64, (11, 11), 1, 5, 1, 1, "nhwc"),
    "13x13": (128, 256, 64, 64, (13, 13), 1, 6, 1, 1, "nhwc"),
    "13x13 stride 2": (2, 32, 28, 28, (13, 13), 2, 6, 1, 1, "nhwc"),
    "17x17": (128, 256, 64, 64, (17, 17), 1, 8, 1, 1, "nhwc"),
    "31x31": (128, 256, 64, 64, (31, 31), 1, 15, 1, 1, "nhwc"),
    "31x31 planes": (8, 256, 28, 28, (31, 31), 1, 15, 1, 1, "nchw"),
    "51x5": (8, 96, 56, 56, (51, 5), 1, (25, 2), 1, 1, "nhwc"),
    "51x5 of odd channels": (128, 249, 28, 28, (51, 5), 1, (25, 2), 1, 1, "nhwc"),
    "5x51": (8, 96, 56, 56, (5, 51), 1, (2, 25), 1, 1, "nhwc"),
    "3x3 of few outputs": (8, 24, 14, 14, (3, 3), 1, 1, 1, 1, "nchw"),
    "3x3 of few outputs, stride 2, multiplier": (2, 20, 28, 28, (3, 3), 2, 1, 1, 2, "nhwc"),
    "27x27, images at once": (128, 512, 14, 14, (27, 27), 1, 13, 1, 1, "nhwc"),
    "7x7, images at once": (128, 768, 7, 7, (7, 7), 1, 3, 1, 1, "nhwc"),
    "7x7, images at once, contiguous": (128, 384, 14, 14, (7, 7), 1, 3, 1, 1, "nchw"),
    "13x13, images at once, contiguous": (128, 1024, 7, 7, (13, 13), 1, 6, 1, 1, "nchw"),
    "27x27, images at once, contiguous": (128, 512, 14, 14, (27, 27), 1, 13, 1, 1, "nchw"),
    "13x13, images at once": (128, 1024, 7, 7, (13, 13), 1, 6, 1, 1, "nhwc"),
    "7x7, images at once, few channels": (128, 256, 7, 7, (7, 7), 1, 9, 3, 1, "nhwc"),
    "1x11": (8, 40, 28, 28, (1, 11), 1, (0, 5), 1, 1, "nhwc"),
    "1x4 along a line": (8, 512, 1, 2048, (1, 4), 1, (0, 3), 1, 1, "nchw"),
    "63x63": (1, 64, 64, 64, (63, 63), 1, 31, 1, 1, "nhwc"),
}
ELSEWHERE = [
    "3x3",
    "3x3 large",
    "3x3 stride 2",
    "5x5 maps",
    "5x5 maps of 7 columns",
    "7x7 maps",
    "5x5 planes of odd width",
    "7x7",
    "7x7 stride 2",
    "7x7 octets of 14 columns",
    "13x13 octets of maps",
    "5x5 octets stride 2",
    "13x13 warps",
    "27x27, images at once",
    "9x9",
    "13x13",
    "31x31 planes",
    "51x5",
]
RUNS = [("sm_90a", name) for name in CASES]
RUNS += [(arch, name) for arch in jit.ARCHITECTURES if arch != "sm_90a" for name in ELSEWHERE]


def capability(arch: str) -> tuple[int, int]:
    digits = arch.removeprefix("sm_").rstrip("a")
    return int(digits[:-1]), int(digits[-1])


@pytest.fixture
def specialisations(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Function from (architecture, case, dtype) to the kernels that its three operators launch: (name, macros)."""

    def find(arch: str, case: str, dtype: torch.dtype) -> list[tuple[str, dict]]:
        asked: list[tuple[str, dict]] = []
        device = SimpleNamespace(name=arch, multi_processor_count=MULTIPROCESSORS[arch])
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: capability(arch))
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda *_: device)
        monkeypatch.setattr(jit, "Launcher", lambda name, macros, *args, **kwargs: asked.append((name, dict(macros))))
        for operator, args in operations(*CASES[case], dtype=dtype):
            cuda = next(backend for backend in operator.backends if backend.name == "cuda")
            before = len(asked)
            cuda.plan(*args)
            assert len(asked) > before, f"{operator.name} launches nothing"
        return asked

    return find


def operations(
    images, channels, height, width, kernel, stride, padding, dilation, multiplier, layout, dtype
) -> Iterator[tuple]:
    memory_format = {"nhwc": torch.channels_last, "nchw": torch.contiguous_format}[layout]

    def tensor(*size: int) -> torch.Tensor:
        return torch.empty(size, dtype=dtype, device="meta").to(memory_format=memory_format)

    vertical, horizontal = padding if isinstance(padding, tuple) else (padding, padding)
    sides = (vertical, vertical, horizontal, horizontal)
    stride = stride if isinstance(stride, tuple) else (stride, stride)
    geometry = (stride, sides, (dilation, dilation))
    x = tensor(images, channels, height, width)
    w = torch.empty(channels * multiplier, 1, *kernel, dtype=dtype, device="meta")
    dy = tensor(images, channels * multiplier, *conv_output_size((height, width), kernel, *geometry))
    yield forward, (x, w, w[:, 0, 0, 0], *geometry, "auto", "auto")
    yield input_grad, (dy, w, tuple(x.shape), *geometry, "auto", "auto")
    yield weight_grad, (dy, x, tuple(w.shape), w.stride(), *geometry, "auto", "auto")


def compile_log(specialisation: tuple[str, dict], arch: str) -> str:
    name, macros = specialisation
    _, log = jit.compile_source(jit._full_source(name, macros), name, arch, verbose=True)
    return log


def kernels() -> set[str]:
    return {path.stem for path in jit.SOURCES.glob("*.cu") if "__global__" in path.read_text()}


@pytest.mark.parametrize(("arch", "case"), RUNS, ids=[f"{arch}-{case}" for arch, case in RUNS])
def test_compiles_without_spills(arch, case, specialisations):
    dtype = torch.bfloat16 if "stride" in case else torch.float16
    found = specialisations(arch, case, dtype)
    with ThreadPoolExecutor(2) as pool:
        logs = list(pool.map(lambda s: compile_log(s, arch), found))
    for (name, macros), log in zip(found, logs):
        frames = re.findall(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", log)
        assert frames, f"no resources in the compiler's log:\n{log}"
        for stack, *spills in frames:
            assert spills == ["0", "0"], f"{name} spills registers: {macros}\n{log}"
            assert stack == "0", f"{name} keeps an array on the stack: {macros}\n{log}"
        static = [int(n) for n in re.findall(r"(\d+) bytes smem", log)]
        assert name not in FILL_SHARED_MEMORY or sum(static) <= STATIC_BYTES, f"{name}: more than the planner counts"


def test_cases_reach_every_kernel(specialisations):
    reached = {name for case in CASES for name, _ in specialisations("sm_90a", case, torch.float16)}
    assert reached == kernels(), "a kernel without a case in this file, or a case without a kernel"


def test_every_architecture_is_tried():
    assert {arch for arch, _ in RUNS} == set(jit.ARCHITECTURES) == set(MULTIPROCESSORS)


def test_an_error_in_a_kernel_shows_log_and_source():
    """Build failures said nothing of the cause. https://github.com/Dao-AILab/causal-conv1d/issues/47"""
    with pytest.raises(jit.CompileError, match="no_such_function") as error:
        jit.compile_source('extern "C" __global__ void broken() { no_such_function(); }', "broken", "sm_90a")
    path = re.search(r"source: (\S+)", str(error.value))[1]
    with open(path) as file:
        assert "no_such_function" in file.read()
