"""A family of layers whose bytes mean the same, and how it was shown that kvferry moves them right."""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass

from kvferry.geometry.plane import Plane
from kvferry.integrations.vllm.layouts.layer import Layer


class Proof(enum.Enum):
    """What filled the caches in the tests of tests/integrations/vllm/layouts. No GPU was used for any of them."""

    KERNEL = "the backend's own cache-write code, on CPU tensors"
    PORT = "vLLM's Triton port of the CUDA or HIP kernel, called by the backend's own code where it has any"
    REFERENCE = "the tests, through vLLM's own view of a page or after the source that the format names"
    SOURCE = "nothing for this backend: its order was read in vLLM's source, and is that of a proven one"


@dataclass(frozen=True, slots=True)
class Family:
    """A family of layers.

    Attributes:
        name: its name for people, e.g. in an error message.
        planes: makes the planes of such a layer.
        proof: how it was shown that they are right.
    """

    name: str
    planes: Callable[[Layer], tuple[Plane, ...]]
    proof: Proof

    @property
    def proven(self) -> bool:
        """Whether the code that writes the layer's cache ran in the tests. If not, only a check on the machine itself
        can show that the planes are right."""
        return self.proof is Proof.KERNEL
