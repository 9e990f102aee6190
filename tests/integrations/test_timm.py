"""A hundred networks of timm train in every mode as in a plain loop in float64."""

from typing import Any

import pytest
import torch
from helpers.extras import require
from helpers.zoo import CLASSES, LIMIT, MODES, Plain, check_mode

from runner.optimizer import SGD

SIZE = 64

NETWORKS = """
convnext_nano convnextv2_nano convnext_nano_ols cpubone_nano cpubone_s0 cpubone_t0 csatv2 cs3darknet_s
cs3darknet_focus_s cspnext_tiny cspnext_s cspnext_m densenet121 densenetblur121d densenet169 dla34 dla46_c dpn68 dpn48b
dpn68b edgenext_small edgenext_x_small edgenext_small_rw ese_vovnet19b_dw tinynet_a tinynet_b tinynet_c efficientvim_m1
efficientvim_m1_dist efficientvim_m2 efficientvit_b0 efficientvit_b1 fasternet_t0 fasternet_t1 fasternet_t2 fastvit_t8
fastvit_t12 fastvit_s12 ghostnet_050 ghostnetv3_050 ghostnet_100 hardcorenas_a hardcorenas_b hardcorenas_c hgnet_tiny
hgnetv2_b0 hgnetv2_b1 hrnet_w18_small hrnet_w18_small_v2 iformer_t iformer_s iformer_l inception_next_atto lcnetv2_small
lcnetv2_base lcnetv2_large lowformer_b0 mambaout_femto test_mambaout mixnet_s mnasnet_050 mobilenetv2_050
mobilenetv3_small_050 poolformer_s12 regnetx_002 regnety_002 resnet10t resnet18 resnetv2_18 semnasnet_050 skresnet18
starnet_s1 test_resnet test_efficientnet
"""
"""Names of networks for images of any size; those whose size is an option follow."""

IN_FLOAT32 = ("efficientvit_b0", "efficientvit_b1")
"""Networks whose attention converts to float32, also if their weights are float64: modes round it differently."""

SIZED = """
botnet26t_256 cait_xxs24_224 cait_xxs24_384 coat_lite_tiny coat_mini coat_tiny convit_tiny
deit_tiny_distilled_patch16_224 deit_tiny_patch16_224 eca_botnext26ts_256 efficientformerv2_s0 efficientformerv2_s1
efficientformerv2_s2 efficientvit_m0 efficientvit_m1 efficientvit_m2 eva02_tiny_patch14_224 eva02_tiny_patch14_336
gcvit_xxtiny gmixer_12_224 gmlp_ti16_224 lambda_resnet26t levit_128 mobileone_s0 repvgg_b0 test_byobnet test_vit
vit_pe_core_tiny_patch16_384 vit_tiny_patch16_224
"""


@pytest.mark.slow
@pytest.mark.parametrize("name", [*NETWORKS.split(), *SIZED.split()])
def test_a_network_of_timm_trains_as_in_a_plain_loop(name, ranks, tmp_path):
    timm = require("timm")
    sized: dict[str, Any] = {"img_size": SIZE} if name in SIZED.split() else {}
    words = [f"model.options={{img_size:{SIZE}}}"] * bool(sized)
    torch.manual_seed(0)
    plain = Plain(
        SIZE, ("model=timm", f"model.name={name}", *words), timm.create_model(name, num_classes=CLASSES, **sized)
    )
    for mode in MODES:
        check_mode(plain, mode, ranks, tmp_path, limit=1e-5 if name in IN_FLOAT32 else LIMIT)


@pytest.mark.cases(("densenet121", "classifier"), ("dpn48b", "classifier"), ("test_byobnet", "head"))
def test_frozen_batch_normalization_of_timm_keeps_its_activation(name, head, ranks, tmp_path):
    timm = require("timm")
    options = ("model=timm", f"model.name={name}", "model.freeze=['*']", f"model.unfreeze=[{head}]")
    plain = Plain(SIZE, options, timm.create_model(name, num_classes=CLASSES))
    for parameter_name, parameter in plain.network.named_parameters():
        parameter.requires_grad_(parameter_name.startswith(f"{head}."))
    check_mode(plain, "single", ranks, tmp_path, frozen=True)


@pytest.mark.parametrize("name", ["resnet18", "convnext_nano", "mobileone_s0", "eva02_tiny_patch14_224"])
def test_learning_rates_by_layer_are_those_of_timm(name):
    timm = require("timm")
    from timm.optim import param_groups_layer_decay

    model = timm.create_model(name)
    theirs = {p: g["lr_scale"] for g in param_groups_layer_decay(model, layer_decay=0.75) for p in g["params"]}
    ours = {p: g["lr"] for g in SGD(lr=1.0, layer_decay=0.75).build(model).param_groups for p in g["params"]}
    for parameter_name, parameter in model.named_parameters():
        assert ours[parameter] == pytest.approx(theirs[parameter]), parameter_name
