# SPDX-License-Identifier: Apache-2.0
"""Weight formats that bench_layer and kt-kernel both train on, and what kt's class for each insists on.

Classes are those of kt_kernel.sft.amx (_SFT_METHOD_TO_CLASS), version 0.7.2; what they refuse they say when they are constructed.
"""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Format:
    kt_class: str
    rank: int | None = None  # of LoRA, where kt knows no other
    resident: bool = True  # the backward has weights of its own or needs none; else kt repacks in every backward
    default: bool = True  # can do what kt_default does
    clamp: float = 0.0  # of gate and up


FORMATS = {
    "bf16": Format("AMXBF16_SFT_MOE"),
    "int8": Format("AMXInt8_SFT_MOE"),
    "int4": Format("AMXInt4_KGroup_SFT_MOE", rank=8, default=False),  # its RAWINT4: groups of 32, BF16 scales
    "int4_row": Format("AMXInt4_SFT_MOE"),
    "fp8": Format("AMXFP8_SFT_MOE", resident=False),
    "mxfp4": Format("MXFP4_SFT_MOE", default=False, clamp=10.0),
}
