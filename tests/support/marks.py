"""Parameters that many tests have."""

import pytest
import torch

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
by_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype)[6:])
by_fp32_and_bf16 = pytest.mark.parametrize("dtype", DTYPES[:2], ids=["fp32", "bf16"])
on_cuda = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="uses torch.cuda")]
by_recompute = pytest.mark.parametrize("recompute", [False, True], ids=["saved", "recompute"])
