"""Counts of what a network does, taken from tensors that have shapes and no content, so that nothing is computed."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.flop_counter import flop_registry

_LOW = {functional.linear, functional.conv1d, functional.conv2d, torch.matmul, torch.bmm, torch.addmm, torch.baddbmm,
        Tensor.matmul, Tensor.bmm, functional.scaled_dot_product_attention}  # fmt: skip
_HIGH = {functional.layer_norm, functional.group_norm, functional.softmax, torch.softmax, Tensor.softmax}


@contextmanager
def shapes_only() -> Iterator[None]:
    """New tensors are on torch's device ``meta``.

    Functions of torch that work there ask torch's compiler to leave them alone. To import it only for that takes longer
    than all the rest, so something that leaves everything alone stands in for it.
    """
    name, stand_in = "torch._dynamo", ModuleType("torch._dynamo")
    stand_in.disable = lambda function=None, *_, **__: function or (lambda each: each)  # type: ignore[attr-defined]
    loaded = name in sys.modules
    sys.modules.setdefault(name, stand_in)
    try:
        with torch.device("meta"):
            yield
    finally:
        if not loaded:
            del sys.modules[name]


class Operations(TorchDispatchMode):
    """Floating-point operations, as FlopCounterMode has them, and bytes that each operation reads and writes."""

    def __init__(self) -> None:
        super().__init__()
        self.count = self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Do an operation and count it."""
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        formula = flop_registry.get(func._overloadpacket)
        if formula is not None:
            self.count += formula(*args, **kwargs, out_val=result)
        if not func.is_view:
            self.bytes += sum(leaf.nbytes for leaf in tree_leaves((args, kwargs, result)) if isinstance(leaf, Tensor))
        return result


class Gpu(TorchFunctionMode):
    """What a GPU does otherwise than the device ``meta``: attention by a fused kernel, and the precision of a training.

    The choice of operations in bf16 is autocast's, for those that backbones consist of.
    """

    def __init__(self, precision: str):
        super().__init__()
        kinds = {"bf16": (torch.bfloat16, torch.float32), "fp64": (torch.float64, torch.float64)}
        self._low, self._high = kinds.get(precision, (None, None))

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call a function of torch, or what stands in for it."""
        kwargs = kwargs or {}
        dtype = self._low if func in _LOW else self._high if func in _HIGH else None
        if dtype is not None:
            args, kwargs = tree_map(lambda item: _converted(item, dtype), (args, kwargs))
        if func is functional.scaled_dot_product_attention:
            return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(*args, **kwargs)[0]
        return func(*args, **kwargs)


def _converted(item: Any, dtype: torch.dtype) -> Any:
    return item.to(dtype) if isinstance(item, Tensor) and item.is_floating_point() else item


class Kept:
    """Memory that a forward pass keeps for the backward pass, each storage once and without the network's own."""

    def __init__(self, network: Any):
        own = [*network.parameters(), *network.buffers()]
        self._known = {value.untyped_storage()._cdata for value in own}
        self._alive: list[Tensor] = []  # an address is a storage's own only as long as it lives
        self.bytes = 0

    def __call__(self, tensor: Tensor) -> Tensor:
        """A tensor that the backward pass will read."""
        storage = tensor.untyped_storage()
        if storage._cdata not in self._known:
            self._known.add(storage._cdata)
            self._alive.append(tensor)
            self.bytes += storage.nbytes()
        return tensor
