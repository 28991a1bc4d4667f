# SPDX-License-Identifier: Apache-2.0
"""Expert weights in the form in which each of kt-kernel's fine-tuning classes takes them. INT8 and INT4 with a scale per row are
made by kt itself from BF16."""

import torch

FP4 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])


def _pairs(codes):
    """Two codes a byte, the even column low."""
    codes = codes.to(torch.uint8).unflatten(-1, (-1, 2))
    return (codes[..., 0] | codes[..., 1] << 4).contiguous()


def _int4(w):
    groups = w.float().unflatten(1, (-1, 32))
    scale = (groups.abs().amax(-1, keepdim=True) / 7).to(torch.bfloat16)
    codes = (groups / scale.float()).round().clamp(-8, 7) + 8
    return _pairs(codes.flatten(1)), scale.squeeze(-1).contiguous()


def _fp8(w):
    blocks = w.float().unflatten(0, (-1, 128)).unflatten(2, (-1, 128))
    scale = blocks.abs().amax((1, 3), keepdim=True) / 448
    codes = (blocks / scale).flatten(2).flatten(0, 1).to(torch.float8_e4m3fn)
    return codes.contiguous(), scale[:, 0, :, 0].contiguous()


def _mxfp4(w):
    groups = w.float().unflatten(1, (-1, 32))
    scale = torch.exp2(torch.ceil(torch.log2(groups.abs().amax(-1, keepdim=True) / 6)))
    values = groups / scale
    codes = torch.bucketize(values.abs(), (FP4[1:] + FP4[:-1]) / 2) + 8 * (values < 0)
    return _pairs(codes.flatten(1)), scale.squeeze(-1).to(torch.bfloat16).contiguous()


MAKERS = {"int4": (_int4, 4, 32), "fp8": (_fp8, 8, 128), "mxfp4": (_mxfp4, 4, 32)}  # bits, group


def configure(config, weights, base):
    """Sets the base weights {"gate": [E, I, H], ...}; returns what must live until they are loaded."""
    if weights not in MAKERS:
        for name, w in base.items():
            setattr(config, f"{name}_proj", w.data_ptr())
        return base
    make, config.quant_config.bits, config.quant_config.group_size = MAKERS[weights]
    config.quant_config.zero_point = False
    kept = {}
    for name, w in base.items():
        codes, scales = zip(*map(make, w))
        if weights == "int4":  # one tensor of all experts
            codes, scales = torch.stack(codes), torch.stack(scales)
            setattr(config, f"{name}_proj", codes.data_ptr())
            setattr(config, f"{name}_scale", scales.data_ptr())
        else:
            setattr(config, f"{name}_projs", [[t.data_ptr() for t in codes]])
            setattr(config, f"{name}_scales", [[t.data_ptr() for t in scales]])
        kept[name] = (codes, scales)
    return kept
