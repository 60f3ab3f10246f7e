"""Where there is no CUDA device Triton's interpreter runs the kernels on CPU tensors."""

import os

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when triton is imported
