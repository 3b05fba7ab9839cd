"""The ``flashdwc`` command: doctor, explain, warmup, bench, demo.

Commands import what they need when they run, so that ``--help`` is quick. A failure ends in one line on standard error
and exit status 1, or 2 for a mistake on the command line.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from . import __version__
from .bench.friendly import UserError, os_error

if TYPE_CHECKING:
    import torch

SUITE_NAMES = ("paper", "thcunn", "models", "mobile", "conv1d", "stress")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line and returns its exit status."""
    options = _parser().parse_args(arguments)
    try:
        return options.run(options) or 0
    except UserError as error:
        return _fail(str(error), error.code)
    except KeyboardInterrupt:
        return _fail("stopped", 130)
    except BrokenPipeError:  # the reader of our output, such as `head`, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        return _fail(str(os_error("go on", error)))
    except MemoryError:
        return _fail("out of memory")
    except Exception as error:
        if _expected(error):
            return _fail((str(error).strip().splitlines() or [type(error).__name__])[0])
        raise


def _fail(message: str, code: int = 1) -> int:
    print(f"flashdwc: {message}", file=sys.stderr)
    return code


def _expected(error: Exception) -> bool:
    """Whether an error is about the user's machine or request, so that its message says enough."""
    import torch

    from .core.errors import CompileError, LaunchError, SettingError, UnsupportedError

    return isinstance(error, (torch.OutOfMemoryError, UnsupportedError, CompileError, LaunchError, SettingError))


# --- commands ---------------------------------------------------------------------------------------------------------


def _doctor(options: argparse.Namespace) -> int:
    from .bench import doctor

    return doctor.run()


def _explain(options: argparse.Namespace) -> None:
    from .bench import ahead
    from .bench.case import is_shape

    device = _device(options.device)
    if is_shape(options.what):
        _refuse_model_options(options)
        print(ahead.explain_shape(options.what, device))
    else:
        print(ahead.explain_model(options.what, _request(options), device))


def _refuse_model_options(options: argparse.Namespace) -> None:
    for name in ("input", "batch", "dtype", "layout"):
        if getattr(options, name) is not None:
            raise UserError(f"--{name}: is for models; a shape names its own, as in 8x96x56x56:k7:fp16:nhwc", code=2)


def _warmup(options: argparse.Namespace) -> None:
    from .bench import ahead, tuning
    from .bench.case import is_shape

    if is_shape(options.what):
        _refuse_model_options(options)
    device = _device(options.device)
    if device.type != "cuda":
        ahead.check(options.what)
        print("nothing to compile: on a CPU flashdwc runs PyTorch operators")
        return
    work = tuning.tune_all if options.tune else ahead.warm_up
    for line in work(options.what, _request(options), device):
        print(line, flush=True)


def _bench(options: argparse.Namespace) -> int:
    from .bench import command, runner
    from .bench.friendly import closest
    from .bench.suites import SUITES

    device = _device(options.device)
    if options.cuda_graph and device.type != "cuda":
        raise UserError(f"--cuda-graph: is for CUDA devices, not for {device}", code=2)
    names = list(SUITES) if "all" in options.suite else list(dict.fromkeys(options.suite))
    for name in names:
        if name not in SUITES:
            raise UserError(
                f"unknown suite {name!r}{closest(name, SUITES)}: expected {', '.join(SUITES)} or all", code=2
            )
    chosen = runner.Options(
        suites=names,
        device=device,
        dtypes=options.dtype or runner.Options.dtypes,
        layouts=options.layout or runner.Options.layouts,
        directions=options.direction,
        batches=options.batch,
        filter=options.filter,
        limit=options.limit,
        compile=options.compile,
        cuda_graph=options.cuda_graph,
        quick=options.quick,
        out=Path(options.out),
    )
    return command.run(chosen)


def _demo(options: argparse.Namespace) -> None:
    from . import demo

    demo.run(demo.Options(_device(options.device), Path(options.out), options.image, options.quick))


def _device(name: str | None) -> torch.device:
    """The named device, or the GPU where there is one and the CPU where not."""
    import torch

    if name is None:
        return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise UserError(f"--device {name}: expected cpu, cuda or cuda:N", code=2) from error
    if device.type not in ("cpu", "cuda"):
        raise UserError(f"--device {name}: expected cpu, cuda or cuda:N", code=2)
    if device.type == "cuda":
        if not torch.cuda.is_available():
            raise UserError(f"--device {name}: PyTorch sees no CUDA device here")
        if (device.index or 0) >= torch.cuda.device_count():
            raise UserError(f"--device {name}: there are {torch.cuda.device_count()} CUDA devices, counted from 0")
        return torch.device("cuda", device.index or 0)
    return torch.device("cpu")


def _request(options: argparse.Namespace):
    from .bench import ahead

    return ahead.Request(options.input, options.batch or [1], options.dtype or ["fp32"], options.layout or "contiguous")


# --- the command line -------------------------------------------------------------------------------------------------


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="flashdwc", description="Fast depthwise convolution for PyTorch.")
    parser.add_argument("--version", action="version", version=f"flashdwc {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    _add_demo(commands)
    _add_doctor(commands)
    _add_explain(commands)
    _add_warmup(commands)
    _add_bench(commands)
    return parser


def _add_demo(commands: argparse._SubParsersAction) -> None:
    command = commands.add_parser(
        "demo",
        help="see what it does: photographs, training, one page with the outcome",
        description="Runs two networks on photographs before and after flashdwc.convert, trains a third on handwritten "
        "digits both ways, and writes report.html. Takes a few minutes on a CPU; --quick takes less.",
    )
    command.add_argument("--out", default="flashdwc-demo", metavar="DIR", help="where to write (default %(default)s)")
    command.add_argument("--image", metavar="FILE", help="your own picture in place of the two photographs")
    command.add_argument("--quick", action="store_true", help="smaller networks and pictures, fewer timings")
    _add_device(command)
    command.set_defaults(run=_demo)


def _add_doctor(commands: argparse._SubParsersAction) -> None:
    command = commands.add_parser(
        "doctor",
        help="check devices, versions, the kernel cache and every backend",
        description="Prints devices, versions, the kernel cache, and whether each backend computes correctly here. "
        "Exit status 0 if the package is usable.",
    )
    command.set_defaults(run=_doctor)


def _add_explain(commands: argparse._SubParsersAction) -> None:
    command = commands.add_parser(
        "explain",
        help="which backend would run, and why",
        description="Prints, for a shape or for every depthwise layer of a model, which backend would run forward and "
        "backward, why, and the least time that the device's ceilings allow. Nothing is computed.",
        epilog=_grammar(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    command.add_argument("what", metavar="MODEL|SHAPE", help="a flashdwc, timm or torchvision model, or a shape")
    _add_model_options(command)
    command.set_defaults(run=_explain)


def _add_warmup(commands: argparse._SubParsersAction) -> None:
    command = commands.add_parser(
        "warmup",
        help="compile the kernels of a model ahead of time",
        description="Runs the depthwise layers of a model, or a shape, forward and backward once for each batch, size "
        "and dtype, so that later runs find their kernels in the cache on disk.",
        epilog=_grammar(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    command.add_argument("what", metavar="MODEL|SHAPE", help="a flashdwc, timm or torchvision model, or a shape")
    command.add_argument(
        "--tune",
        action="store_true",
        help="time every way to compute each layer and use the fastest from then on, on this machine",
    )
    _add_model_options(command)
    command.set_defaults(run=_warmup)


def _add_model_options(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--input", type=_sizes, metavar="CxHxW,..", help="input sizes of a model, without batch (default: its own)"
    )
    command.add_argument("--batch", type=_numbers, metavar="N,..", help="batch sizes of a model's input (default 1)")
    command.add_argument(
        "--dtype", type=_words, metavar="NAME,..", help="of a model: fp32, fp16, bf16 or fp64 (default fp32)"
    )
    command.add_argument(
        "--layout",
        choices=("contiguous", "channels_last"),
        help="memory format of a model and its input (default contiguous)",
    )
    _add_device(command)


def _add_bench(commands: argparse._SubParsersAction) -> None:
    command = commands.add_parser(
        "bench",
        help="measure layers against PyTorch's best",
        description="Measures suites of layers against PyTorch in both memory layouts, one process, taking turns. "
        "Writes results.json, results.csv, plots and report.html; an interrupted run keeps the rows it has.",
    )
    command.add_argument("suite", nargs="+", metavar="SUITE", help=f"{', '.join(SUITE_NAMES)}, or all")
    command.add_argument("--filter", default="", metavar="TEXT", help="only cases whose name or shape contains TEXT")
    command.add_argument(
        "--dtype", type=_words, metavar="NAME,..", help="fp32, fp16, bf16, fp64 (default the first three)"
    )
    command.add_argument("--layout", type=_words, metavar="NAME,..", help="channels_last, contiguous (default both)")
    command.add_argument(
        "--direction",
        type=_words,
        metavar="NAME,..",
        help="forward, input_grad, weight_grad, train (default: the suite's)",
    )
    command.add_argument("--batch", type=_numbers, metavar="N,..", help="batch sizes in place of the suite's")
    command.add_argument("--limit", type=_number, metavar="N", help="only the first N cases of each suite")
    command.add_argument("--compile", action="store_true", help="torch.compile(mode='max-autotune') as a baseline too")
    command.add_argument("--cuda-graph", action="store_true", help="replay CUDA graphs: GPU time without the host's")
    command.add_argument("--quick", action="store_true", help="batch 1, short timings, large cases left out")
    command.add_argument("--out", default="flashdwc-bench", metavar="DIR", help="where to write (default %(default)s)")
    _add_device(command)
    command.set_defaults(run=_bench)


def _add_device(command: argparse.ArgumentParser) -> None:
    command.add_argument("--device", metavar="NAME", help="cpu, cuda or cuda:N (default: a GPU if there is one)")


def _grammar() -> str:
    return (
        "SHAPE is sizes, then options in any order, joined by colons:\n"
        "  NxCxHxW or NxCxL     batch, channels, height, width (or length)\n"
        "  kK or kKHxKW         kernel (default k7), for example k31 or k51x5\n"
        "  sS  dD  mM           stride, dilation, channel multiplier (default 1)\n"
        "  pP                   padding on every side (default: centred, which keeps the size at stride 1)\n"
        "  fp16 bf16 fp32 fp64  dtype (default fp32)\n"
        "  nhwc nchw            channels_last or contiguous (default nhwc)\n"
        "for example 128x256x64x64:k7:fp16:nhwc, 8x124x56x56:k51x5, 16x512x2000:k31:bf16"
    )


def _words(text: str) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()]


def _number(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a positive number, got {text!r}")
    return int(text)


def _numbers(text: str) -> list[int]:
    return [_number(word) for word in _words(text)]


def _sizes(text: str) -> list[tuple[int, ...]]:
    return [tuple(_number(side) for side in size.lower().split("x")) for size in _words(text)]
