"""What runs on a CUDA device in torch's own ops keeps float32 products in float32."""

import pytest
import torch

from witcert_kernels.precision import full_precision


@pytest.mark.parametrize("precision", ["tf32", "ieee", "none"])
def test_tf32_is_off_inside_and_as_before_outside(precision: str) -> None:
    matmul = torch.backends.cuda.matmul
    before = matmul.fp32_precision
    matmul.fp32_precision = precision
    try:
        with full_precision(torch.device("cuda")), full_precision(torch.device("cuda")):
            assert matmul.fp32_precision == "ieee"
        assert matmul.fp32_precision == precision
    finally:
        matmul.fp32_precision = before
