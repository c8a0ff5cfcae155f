"""Everything random as a function of (seed, stream, step): a resumed training needs no random state.

Streams are separate, and the same for all methods of a seed, so that comparisons between methods are paired.
"""

import hashlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def derived_seed(seed: int, stream: str, step: int = 0) -> int:
    """A 63-bit seed for one stream at one step: the first bytes of SHA-256 of the three."""
    digest = hashlib.sha256(f"{seed}/{stream}/{step}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


def generator(seed: int, stream: str, step: int = 0, device: "torch.device | str" = "cpu") -> "torch.Generator":
    """A generator for one stream at one step."""
    import torch

    return torch.Generator(device).manual_seed(derived_seed(seed, stream, step))
