"""Makes vLLM's Triton kernels run on CPU tensors, in this process, under Triton's interpreter.

vLLM asks for a Triton driver when it is imported, and finds none on a CPU. Import this module first.
"""

from __future__ import annotations

from types import SimpleNamespace

import triton
from triton.backends import backends

triton.knobs.runtime.interpret = True
# The interpreter needs no driver: the entry only stands for one.
backends.setdefault("cpu", SimpleNamespace(driver=None))
