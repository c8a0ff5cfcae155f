"""torch, imported when it is first used: commands and tables that need numpy alone start without it."""

from types import ModuleType
from typing import TYPE_CHECKING, Any

__all__ = ["Tensor", "torch"]

if TYPE_CHECKING:
    import torch
    from torch import Tensor
else:

    class _Torch(ModuleType):
        """Module whose attributes are those of torch."""

        def __getattr__(self, name: str) -> Any:
            import torch

            vars(self)[name] = value = getattr(torch, name)
            return value

    torch, Tensor = _Torch("torch"), Any
