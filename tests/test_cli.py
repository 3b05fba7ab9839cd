"""The command line: what each command prints, and that every failure is one line."""

from __future__ import annotations

import errno
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import flashdwc
from flashdwc import cli
from flashdwc.bench.case import DTYPES
from flashdwc.bench.suites import SUITES
from flashdwc.cli import main

needs_no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")


def fails(capsys, code: int, *arguments: str) -> str:
    """Runs a command that must fail with ``code``; returns its one line."""
    assert main(arguments) == code
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1, lines
    assert lines[0].startswith("flashdwc: ")
    return lines[0]


def test_a_model_of_a_package_that_is_missing(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "timm", None)
    assert "timm is not installed: pip install" in fails(capsys, 1, "explain", "timm:convnext_atto")
    assert "not installed: timm (pip install" in fails(capsys, 2, "explain", "convnext_atto")


def test_a_near_name_of_two_packages_is_told_once(capsys):
    near = fails(capsys, 2, "explain", "vgg133").partition("did you mean ")[2].rstrip("?)").split(", ")
    assert "vgg13" in near
    assert len(set(near)) == len(near)


def test_runs_as_a_module():
    command = [sys.executable, "-m", "flashdwc", "--version"]
    home = {**os.environ, "PYTHONPATH": str(Path(flashdwc.__file__).parents[1])}  # also where it is not installed
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True, env=home)
    assert result.stdout.strip() == f"flashdwc {flashdwc.__version__}"


def test_help_names_every_command_and_suite(capsys):
    for arguments in (["--help"], ["bench", "--help"], ["explain", "--help"]):
        with pytest.raises(SystemExit) as stop:
            main(arguments)
        assert stop.value.code == 0
    text = capsys.readouterr().out
    for word in ("demo", "doctor", "explain", "warmup", "bench", *SUITES, *DTYPES, "kKHxKW"):
        assert word in text
    assert cli.SUITE_NAMES == tuple(SUITES)


def test_doctor_finds_the_package_usable(capsys):
    assert main(["doctor"]) == 0
    text = capsys.readouterr().out
    assert torch.__version__ in text
    assert re.search(r"kernel cache +\S+, ", text)
    assert re.search(r"cpu on cpu, float32 +works", text)
    assert re.search(r"torch on cpu, float16 +works", text)
    assert re.search(r"verdict +usable", text)


@needs_no_gpu
def test_doctor_says_why_cuda_does_not_work(capsys):
    main(["doctor"])
    assert re.search(r"cuda +.*(no CUDA device|without CUDA)", capsys.readouterr().out)


def test_doctor_survives_an_unusable_cache(capsys, monkeypatch, tmp_path):
    from dataclasses import replace

    from flashdwc.bench import doctor

    (tmp_path / "file").write_text("")
    monkeypatch.setattr(doctor, "config", replace(doctor.config, cache_dir=tmp_path / "file" / "cache"))
    assert main(["doctor"]) == 0
    assert "is not a folder" in capsys.readouterr().out


def test_doctor_tries_all_backends_whatever_the_default():
    home = {**os.environ, "PYTHONPATH": str(Path(flashdwc.__file__).parents[1]), "FLASHDWC_IMPL": "cuda"}
    command = [sys.executable, "-m", "flashdwc", "doctor"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True, env=home)
    assert re.search(r"cpu on cpu, float32 +works", result.stdout)
    assert re.search(r"verdict +usable", result.stdout)


@pytest.mark.parametrize("shape", ["2x16x14x14", "2x16x14x14:k5x3:s2:d2:m2:fp16:nchw", "4x8x100:k4:bf16"])
def test_explain_of_a_shape(capsys, shape):
    assert main(["explain", shape, "--device", "cpu"]) == 0
    text = capsys.readouterr().out
    for operator in ("depthwise_conv:", "input_grad:", "weight_grad:", "torch"):
        assert operator in text


@pytest.mark.parametrize("command", ["explain", "warmup"])
@pytest.mark.parametrize(
    "option", [["--batch", "2"], ["--dtype", "fp16"], ["--layout", "contiguous"], ["--input", "3x9x9"]]
)
def test_a_shape_names_its_own_options(capsys, command, option):
    line = fails(capsys, 2, command, "2x16x14x14", "--device", "cpu", *option)
    assert line.startswith(f"flashdwc: {option[0]}: is for models")


def test_explain_names_the_formulation_on_a_cpu(capsys):
    from flashdwc.kernels.cpu.depthwise_formulations import FORMULATIONS

    assert main(["explain", "2x16x14x14:k3", "--device", "cpu"]) == 0
    text = capsys.readouterr().out
    assert sum(text.count(formulation) for formulation in FORMULATIONS.values()) == 3  # forward and two gradients


def test_explain_of_a_model(capsys):
    arguments = [
        "explain",
        "timm:convnext_atto",
        "--input",
        "3x64x64",
        "--batch",
        "2",
        "--dtype",
        "bf16",
        "--device",
        "cpu",
    ]
    assert main(arguments) == 0
    text = capsys.readouterr().out
    assert "convnext_atto, input 2x3x64x64, bf16, contiguous, on cpu" in text
    assert len(re.findall(r"conv_dw +2x\d+x\d+x\d+ +7x7", text)) == 12
    assert "weight grad" in text


@pytest.mark.parametrize("name", ["replknet_31b", "torchvision:mobilenet_v2"])
def test_explain_knows_several_collections(capsys, name):
    assert main(["explain", name, "--device", "cpu"]) == 0
    assert "3x3" in capsys.readouterr().out


def test_warmup_has_nothing_to_do_on_a_cpu(capsys):
    assert main(["warmup", "convnext_atto", "--device", "cpu"]) == 0
    assert "nothing to compile" in capsys.readouterr().out


def test_bench_all_options(tmp_path, capsys):
    arguments = [
        "bench", "conv1d", "--filter", "conformer", "--dtype", "fp32", "--layout", "contiguous",
        "--direction", "forward", "--batch", "1,2", "--limit", "1", "--quick", "--device", "cpu",
        "--out", str(tmp_path / "new" / "folder"),
    ]  # fmt: skip
    assert main(arguments) == 0
    assert "conv1d   forward          1 rows" in capsys.readouterr().out
    assert (tmp_path / "new" / "folder" / "report.html").exists()


@pytest.mark.parametrize(
    ("code", "arguments", "words"),
    [
        (2, ["explain", "convnext_attto"], ["convnext_attto", "did you mean convnext_atto"]),
        (2, ["explain", "hub:convnext_atto"], ["hub", "timm"]),
        (2, ["explain", "1x8x9x9:k"], ["'k'"]),
        (2, ["explain", "1x8x9x9:k3:fp16:k5"], ["'k5'"]),
        (2, ["explain", "1x8x9x9:fp16:bf16"], ["'bf16'"]),
        (2, ["warmup", "convnext_attto", "--device", "cpu"], ["convnext_attto", "did you mean convnext_atto"]),
        (2, ["warmup", "1x8x5x5:k9:p0", "--device", "cpu"], ["kernel", "larger"]),
        (2, ["bench", "mobile", "--cuda-graph", "--device", "cpu"], ["--cuda-graph", "cpu"]),
        (2, ["explain", "convnext_atto", "--dtype", "int8"], ["int8", "fp16"]),
        (1, ["explain", "convnext_atto", "--input", "5x64x64"], ["1x5x64x64", "does not run"]),
        (1, ["explain", "resnet18"], ["no depthwise layer"]),
        (2, ["bench", "mobil"], ["mobil", "did you mean mobile"]),
        (2, ["bench", "mobile", "--dtype", "fp8"], ["fp8", "fp16"]),
        (2, ["bench", "mobile", "--direction", "up"], ["up", "forward"]),
        (2, ["bench", "mobile", "--filter", "nothing like it"], ["nothing like it"]),
        (2, ["demo", "--device", "toaster"], ["toaster", "cuda:N"]),
    ],
)
def test_mistakes_are_one_line(capsys, code, arguments, words):
    line = fails(capsys, code, *arguments)
    for word in words:
        assert word in line


@pytest.mark.parametrize("arguments", [["bench", "mobile", "--limit", "0"], ["bench"], ["bake"], []])
def test_bad_usage_is_argparses(capsys, arguments):
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    assert stop.value.code == 2
    assert "usage: flashdwc" in capsys.readouterr().err


@needs_no_gpu
def test_an_absent_gpu_is_one_line(capsys):
    assert "no CUDA device" in fails(capsys, 1, "explain", "1x8x9x9", "--device", "cuda")


@pytest.mark.parametrize("command", [["demo", "--quick"], ["bench", "mobile", "--quick", "--limit", "1"]])
def test_an_output_folder_that_cannot_be_is_one_line(capsys, tmp_path, command):
    (tmp_path / "file").write_text("")
    for out in (tmp_path / "file", tmp_path / "file" / "below"):
        line = fails(capsys, 1, *command, "--device", "cpu", "--out", str(out))
        assert "cannot write to" in line
        assert "not a folder" in line


@pytest.mark.parametrize(("number", "words"), [(errno.ENOSPC, "no space left"), (errno.EACCES, "no permission")])
def test_a_full_or_forbidden_disk_is_one_line(capsys, tmp_path, monkeypatch, number, words):
    def refuse(path, *_, **__):
        raise OSError(number, "refused", str(path))

    monkeypatch.setattr(Path, "write_bytes", refuse)
    assert words in fails(capsys, 1, "demo", "--quick", "--out", str(tmp_path))


def test_a_disk_that_fills_up_later_is_one_line(capsys, tmp_path, monkeypatch):
    def refuse(path, *_, **__):
        raise OSError(errno.ENOSPC, "refused", str(path))

    monkeypatch.setattr(Path, "write_text", refuse)
    arguments = ["bench", "mobile", "--quick", "--limit", "1", "--dtype", "fp32", "--direction", "forward"]
    assert "no space left" in fails(capsys, 1, *arguments, "--device", "cpu", "--out", str(tmp_path))


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("notes.txt", b"no picture", "not a picture"),
        ("cut.png", b"\x89PNG\r\n\x1a\n" + bytes(8), "cannot read the image"),
        ("missing.png", None, "no such file"),
    ],
)
def test_an_unreadable_image_is_one_line(capsys, tmp_path, name, content, words):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    line = fails(capsys, 1, "demo", "--quick", "--image", str(tmp_path / name), "--out", str(tmp_path / "out"))
    assert words in line
    assert name in line


@pytest.mark.parametrize("module", ["matplotlib", "rich", "timm"])
def test_a_missing_package_says_what_to_install(capsys, tmp_path, monkeypatch, module):
    for name in [name for name in sys.modules if name == module or name.startswith(f"{module}.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, module, None)
    line = fails(capsys, 1, "demo", "--quick", "--device", "cpu", "--out", str(tmp_path))
    assert f"{module} is not installed: pip install 'flashdwc[bench]'" in line


def test_interruption_is_one_line(capsys, monkeypatch):
    def stop(options):
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "_doctor", stop)
    assert "stopped" in fails(capsys, 130, "doctor")


def test_a_bug_keeps_its_traceback(monkeypatch):
    def bug(options):
        raise ZeroDivisionError

    monkeypatch.setattr(cli, "_doctor", bug)
    with pytest.raises(ZeroDivisionError):
        main(["doctor"])
