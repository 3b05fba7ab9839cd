"""RepLKNet and SLaK: sizes of the papers, training, exact merging."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from flashdwc import models
from flashdwc.convert import convert, restore
from flashdwc.models.blocks import DropPath
from flashdwc.models.replknet import ReparamLargeKernelConv
from flashdwc.models.slak import LargeKernel
from flashdwc.nn import DepthwiseConv2d


def small_replknet(**options) -> models.RepLKNet:
    options = {"num_classes": 5, "ffn_ratio": 2, **options}
    return models.RepLKNet((13, 9), (1, 2), (8, 12), **options)


def small_slak(**options) -> models.SLaK:
    options = {"num_classes": 5, "width_factor": 1.3, "layer_scale_init_value": 1.0, **options}
    return models.SLaK(depths=(1, 2), dims=(8, 12), kernel_size=(13, 5, 5), **options)


SMALL = [small_replknet, small_slak]


def with_statistics(model: nn.Module) -> nn.Module:
    """Random BatchNorm parameters and statistics, in float64 and evaluation mode."""
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            for values in (module.weight, module.running_var):
                nn.init.uniform_(values, 0.5, 2)
            for values in (module.bias, module.running_mean):
                nn.init.normal_(values)
    return model.double().eval()


@pytest.mark.parametrize(
    ("create", "millions"),
    [
        (models.replknet_31b, 79.9),
        (models.create_RepLKNet31L, 172.7),
        (models.create_RepLKNetXL, 335.4),
        (models.slak_tiny, 50.7),
        (models.SLaK_small, 91.1),
        (models.SLaK_base, 158.0),
    ],
)
def test_parameter_counts_are_those_of_the_papers(create, millions):
    with torch.device("meta"):
        model = create()
    assert sum(p.numel() for p in model.parameters()) / 1e6 == pytest.approx(millions, abs=0.05)


def test_parameter_names_are_those_of_the_published_weights():
    names = small_replknet().state_dict().keys()
    assert {
        "stem.0.conv.weight",
        "stages.0.blocks.0.prelkb_bn.weight",
        "stages.0.blocks.0.pw1.conv.weight",
        "stages.0.blocks.0.large_kernel.lkb_origin.conv.weight",
        "stages.0.blocks.0.large_kernel.small_conv.bn.running_var",
        "stages.0.blocks.1.preffn_bn.bias",
        "stages.1.blocks.3.pw2.bn.bias",
        "transitions.0.1.conv.weight",
        "norm.weight",
        "head.bias",
    } <= names
    assert "stages.0.blocks.0.large_kernel.lkb_reparam.bias" in small_replknet(small_kernel_merged=True).state_dict()


@pytest.mark.parametrize("small", SMALL)
def test_every_spatial_depthwise_layer_is_ours(small):
    grouped = [m for m in small().modules() if isinstance(m, nn.Conv2d) and m.groups > 1]
    assert grouped and all(type(m) is DepthwiseConv2d for m in grouped)


@pytest.mark.parametrize("small", SMALL)
def test_same_result_as_a_network_of_pytorchs_layers(small):
    ours, theirs = small(), small(depthwise=nn.Conv2d)
    theirs.load_state_dict(ours.state_dict())
    assert not any(isinstance(m, DepthwiseConv2d) for m in theirs.modules())
    x = torch.randn(2, 3, 64, 48)
    torch.testing.assert_close(ours.eval()(x), theirs.eval()(x), rtol=1e-4, atol=1e-5)
    assert len(convert(theirs).converted) == sum(type(m) is DepthwiseConv2d for m in ours.modules())


@pytest.mark.parametrize("small", SMALL)
@pytest.mark.parametrize("options", [{}, {"drop_path_rate": 0.5}])
def test_training_lowers_the_loss_and_reaches_every_parameter(small, options):
    torch.manual_seed(0)
    model = small(**options)
    x, labels = torch.randn(10, 3, 32, 32), torch.arange(10) % 5
    optimiser = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for _ in range(8):
        loss = nn.functional.cross_entropy(model(x), labels)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    if not options:
        assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in model.parameters())


@pytest.mark.parametrize(
    "model",
    [
        small_replknet(),
        small_replknet(small_kernel=3, dw_ratio=1.5),
        small_replknet(small_kernel=None),
        small_slak(),
        small_slak(decomposed=False),
    ],
    ids=["replknet", "replknet-wide", "replknet-large-only", "slak", "slak-dense"],
)
def test_merging_is_exact(model):
    model = with_statistics(copy.deepcopy(model))
    x = torch.randn(2, 3, 64, 56, dtype=torch.float64)
    expected, parameters = model(x), sum(1 for _ in model.parameters())
    model.structural_reparam()
    torch.testing.assert_close(model(x), expected, rtol=1e-10, atol=1e-10)
    assert sum(1 for _ in model.parameters()) < parameters
    state = model.state_dict()
    model.structural_reparam()
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())


def test_merged_weights_load_into_the_merged_form():
    model = with_statistics(small_replknet())
    x = torch.randn(1, 3, 32, 32, dtype=torch.float64)
    expected = model(x)
    model.structural_reparam()
    merged = small_replknet(small_kernel_merged=True).double().eval()
    merged.load_state_dict(model.state_dict())
    torch.testing.assert_close(merged(x), expected)


def test_merging_keeps_the_layer_class_and_can_still_be_restored():
    model = with_statistics(small_replknet(depthwise=nn.Conv2d))
    convert(model)
    model.structural_reparam()
    assert type(model.stages[0].blocks[0].large_kernel.lkb_reparam) is DepthwiseConv2d
    restore(model)
    assert type(model.stages[0].blocks[0].large_kernel.lkb_reparam) is nn.Conv2d


def test_merged_slak_kernel_is_two_strips():
    block = with_statistics(LargeKernel(6, 13, 5))
    block.merge_kernel()
    assert [layer.kernel_size for layer in block.large] == [(13, 5), (5, 13)] and block.small is None


@pytest.mark.parametrize("small", SMALL)
def test_features_of_chosen_stages(small):
    model = small(out_indices=(0, 1)).eval()
    features = model(torch.randn(1, 3, 64, 32))
    assert [f.shape[2:] for f in features] == [(16, 8), (8, 4)]
    assert "head.weight" not in model.state_dict()
    assert small(num_classes=None).eval()(torch.randn(2, 3, 32, 32)).shape == (2, features[-1].shape[1])


def test_intermediate_features_are_normalised_where_asked():
    model = small_replknet(out_indices=(1,), norm_intermediate_features=True)
    (feature,) = model(torch.randn(8, 3, 64, 64))
    torch.testing.assert_close(feature.mean((0, 2, 3)), torch.zeros(12), rtol=0, atol=1e-5)


def test_checkpointing_changes_no_gradient():
    plain, saving = small_replknet().double(), small_replknet(use_checkpoint=True).double()
    saving.load_state_dict(plain.state_dict())
    x = torch.randn(2, 3, 32, 32, dtype=torch.float64)
    for model in (plain, saving):
        model(x).square().sum().backward()
    for a, b in zip(plain.parameters(), saving.parameters()):
        torch.testing.assert_close(a.grad, b.grad)


def test_drop_path_drops_whole_samples_and_keeps_the_mean():
    torch.manual_seed(0)
    y = DropPath(0.25)(torch.ones(4000, 2, 3))
    assert y.unique().tolist() == pytest.approx([0, 1 / 0.75])
    assert (y == y[:, :1, :1]).all()
    assert y.mean().item() == pytest.approx(1, abs=0.05)
    assert torch.equal(DropPath(0.25).eval()(y), y)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: models.RepLKNet((13,), (1, 2), (8, 12)), "large_kernel_sizes, layers, channels: .* got 1, 2 and 2"),
        (lambda: models.SLaK(kernel_size=(13, 5)), "kernel_size, depths, dims: .* got 2, 4 and 4"),
        (lambda: small_replknet(out_indices=(2,)), r"out_indices: expected numbers from 0 to 1, got \[2\]"),
        (lambda: small_slak(out_indices=(-1,)), r"out_indices: expected numbers from 0 to 1, got \[-1\]"),
        (lambda: ReparamLargeKernelConv(8, 12), "kernel size: expected a positive odd number, got 12"),
        (lambda: ReparamLargeKernelConv(8, 5, 7), "small kernel: .* up to the kernel size 5, got 7"),
        (lambda: LargeKernel(8, 13, 4), "small kernel: .* got 4"),
        (lambda: DropPath(1.0), r"rate: expected a probability in \[0, 1\), got 1.0"),
    ],
)
def test_wrong_configurations_are_refused(build, message):
    with pytest.raises(ValueError, match=message):
        build()
