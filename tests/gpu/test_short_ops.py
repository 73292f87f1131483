"""On the GPU a norm is one kernel of torch's that rounds as the module does, for widths of real models."""

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from tests.engine.lora.test_short_ops import every_norm
from trimtab.engine.lora import fewer_ops
from trimtab.engine.lora.store import AdapterStore

DEVICE = torch.device("cuda")


def kernels(call):
    call()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        call()
        torch.cuda.synchronize()
    return [event.name for event in seen.events() if event.device_type == torch.autograd.DeviceType.CUDA]


@pytest.mark.skipif(fewer_ops.why_not(DEVICE) is not None, reason=str(fewer_ops.why_not(DEVICE)))
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("width", [128, 256, 512, 1536, 2560, 5376])
@every_norm
def test_a_norm_takes_its_form_and_few_kernels(kind, options, form, most, width, dtype):
    torch.manual_seed(width)
    model, told = nn.ModuleList([kind(width, **options).to(DEVICE, dtype).requires_grad_(False)]), []
    if getattr(model[0], "weight", None) is not None:
        nn.init.normal_(model[0].weight)
    x = torch.randn(8, 1, width, device=DEVICE).to(dtype)
    expected = model[0](x)
    short = fewer_ops.ShortOps(model, AdapterStore(), DEVICE, lambda what, why: told.append(why))
    with short.step(), torch.no_grad():
        found = model[0](x)
        launched = kernels(lambda: model[0](x))
    assert fewer_ops.why_other(found, expected, roundings=fewer_ops.ROUNDINGS[form]) is None and told == []
    wanted = "inside" if dtype == torch.float32 and form == "after" else form
    assert list(short.proved.values()) == [wanted] and len(launched) <= most, launched
