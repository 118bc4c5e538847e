"""Makes vLLM's Triton kernels run on CPU tensors, in this process, under Triton's interpreter.

vLLM asks for a Triton driver when it is imported, and finds none on a CPU. Import this module first.
"""

from __future__ import annotations

import os
from types import SimpleNamespace

# Triton's own functions are made when it is imported, vLLM's kernels later. Processes started here must not inherit it.
os.environ["TRITON_INTERPRET"] = "1"
import triton
from triton.backends import backends

del os.environ["TRITON_INTERPRET"]
triton.knobs.runtime.interpret = True
# The interpreter needs no driver: the entry only stands for one.
backends.setdefault("cpu", SimpleNamespace(driver=None))
