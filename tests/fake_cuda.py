"""CUDA device on a machine without a GPU: shows on which device tensors are, and what synchronises with the device.

Tensors on ``cuda:0`` are torch's fake tensors, with a shape, a type and a device but without values. Tensors on the CPU
are real. An operation that mixes devices raises an error, and so does one whose shape depends on values (``nonzero``,
boolean indexing). Code that reads a value gets 1.

Synchronisations are recorded with the function of kairos that causes each of them:

- values that are read (``item``, ``tolist``, ``bool``);
- copies to the host;
- copies to the device that are not asynchronous from pinned memory.

On request, the kernels that a GPU would start are counted too.
"""

import math
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, distributed, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.overrides import TorchFunctionMode
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import kairos
import kairos_timesteps

DEVICE = torch.device("cuda", 0)
_PACKAGES = [Path(package.__file__).parent for package in (kairos, kairos_timesteps)]
_COPIES = (torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default)
_VALUE_READS = ("item", "_local_scalar_dense", "is_nonzero", "equal")
_INDEXING = ("index", "index_put", "index_put_", "_unsafe_index", "_index_put_impl_")


_WITHOUT_KERNELS = ("lift_fresh", "_reshape_alias", "_unsafe_view", "set_", "resize_", "_local_scalar_dense", "detach_")
_TENSORS_OF_CAT = 128  # inputs of one kernel, see CAT_ARRAY_BATCH_SIZE of torch
_TENSORS_OF_NORM = 400  # results of one kernel, see MAX_TENSORS_PER_KERNEL of torch
_CHUNK = 65_536  # values of a block


@dataclass(frozen=True)
class ListLimits:
    """Most tensors and blocks that the arguments of a kernel on lists of tensors hold, see MultiTensorApply.cuh.

    Attributes:
        tensors: tensors of a list, by number of lists.
        blocks: blocks of 65,536 values.
    """

    tensors: tuple[int, ...]
    blocks: int


CUDA_12 = ListLimits((110, 64, 48, 36, 30), 320)
CUDA_13 = ListLimits((770, 448, 336, 252, 210), 2240)


@dataclass
class Record:
    """Synchronisations and collectives, each as ``kind in module.function``.

    Attributes:
        launches: number of kernels by ``module.function`` and operation of torch, see `count_kernels`; counted if
            `counts_launches` is True.
        list_limits: limits of kernels on lists of tensors, which depend on the CUDA version that torch was built with.
    """

    synchronisations: list[str] = field(default_factory=list)
    collectives: list[str] = field(default_factory=list)
    launches: Counter[tuple[str, str]] = field(default_factory=Counter)
    counts_launches: bool = False
    list_limits: ListLimits = CUDA_13

    def clear(self) -> None:
        """Forget what has been recorded."""
        self.synchronisations.clear()
        self.collectives.clear()
        self.launches.clear()


class _Mode(TorchDispatchMode):
    """Run operations on the CPU for real, operations on the device on fake tensors, and record synchronisations."""

    def __init__(self, record: Record, pinned: set[int]):
        super().__init__()
        self.record = record
        self.pinned = pinned

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function.namespace == "prim":  # such as the device of a tensor: most calls
            return function(*args, **kwargs)
        leaves = tree_leaves((args, kwargs))
        on_device = any(map(_is_on_device, leaves))
        name = function.__name__.split(".")[0]
        if function.namespace == "c10d":
            self.record.collectives.append(f"{name} in {caller()}")
        if not on_device and not any(isinstance(leaf, torch.device) and leaf.type == "cuda" for leaf in leaves):
            with unset_fake_temporarily():
                return function(*args, **kwargs)
        if self.record.counts_launches:
            kernels = count_kernels(function, args, self.record.list_limits)
            if kernels:
                self.record.launches[caller(), name] += kernels
        if name in _VALUE_READS:
            self.record.synchronisations.append(f"value read in {caller()}")
            with unset_fake_temporarily():
                return True if name in ("is_nonzero", "equal") else torch.ones((), dtype=args[0].dtype).item()
        if name in _INDEXING and not all(map(_is_on_device, tree_leaves(args[1]))):
            self.record.synchronisations.append(f"index copied to the device in {caller()}")
        if function in _COPIES:
            return self._copy(function, args, kwargs)
        return function(*args, **kwargs)

    def _copy(self, function: Any, args: Any, kwargs: Any) -> Any:
        """Copy a tensor between host and device with `function`."""
        in_place = function is torch.ops.aten.copy_.default
        source = args[1] if in_place else args[0]
        to_device = _is_on_device(args[0]) if in_place else kwargs.get("device", source.device).type == "cuda"
        if _is_on_device(source) and not to_device:
            self.record.synchronisations.append(f"copy to the host in {caller()}")
            with unset_fake_temporarily():
                values = torch.ones(source.shape, dtype=kwargs.get("dtype", source.dtype))
                return args[0].copy_(values) if in_place else values
        asynchronous = kwargs.get("non_blocking", False) or (in_place and len(args) > 2 and args[2])
        if not _is_on_device(source) and not (asynchronous and source.untyped_storage()._cdata in self.pinned):
            self.record.synchronisations.append(f"copy to the device in {caller()}")
        return function(*args, **kwargs)


def _is_on_device(value: Any) -> bool:
    """Return True for a tensor on the device; `Tensor.is_cuda` would be a further operation of the fake mode."""
    return isinstance(value, FakeTensor) and value.fake_device.type == "cuda"


def count_kernels(function: Any, args: Any, limits: ListLimits) -> int:
    """Return the number of kernels or copies that an operation of torch starts on a GPU, at least.

    Views and empty tensors start none. Operations on lists of tensors start several kernels for long lists. Every other
    operation counts as one kernel, although some start more, such as the backward pass of a convolution.
    """
    name = function.__name__.split(".")[0]
    returns = function._schema.returns
    aliases = [result.alias_info for result in returns if result.alias_info is not None]
    is_view = any(not alias.is_write for alias in aliases)
    is_property = function.namespace == "prim"  # such as the device of a tensor
    if is_view or is_property or name.startswith(("empty", "new_empty")) or name in _WITHOUT_KERNELS:
        return 0
    lists = [argument for argument in args if isinstance(argument, (list, tuple)) and _are_tensors(argument)]
    if name in ("cat", "stack"):
        return math.ceil(len(lists[0]) / _TENSORS_OF_CAT)
    if not lists or not name.startswith(("_foreach", "_fused", "_amp_foreach")):
        return 1
    if name.startswith("_fused_ada"):
        lists = lists[:-1]  # the numbers of steps are not among the lists that the limits count
    most_tensors = limits.tensors[min(len(lists), 5) - 1]
    blocks = sum(math.ceil(tensor.numel() / _CHUNK) for tensor in lists[0])
    kernels = max(math.ceil(len(lists[0]) / most_tensors), math.ceil(blocks / limits.blocks))
    if name == "_foreach_norm":  # one kernel clears the partial sums, others add them up
        kernels += 1 + math.ceil(len(lists[0]) / _TENSORS_OF_NORM)
    return kernels


def _are_tensors(values: Any) -> bool:
    return len(values) > 0 and all(isinstance(value, Tensor) for value in values)


class _Assignments(TorchFunctionMode):
    """Assign data of a tensor on another device: torch cannot do so between real and fake tensors."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function == Tensor.data.__set__ and args[0].device != args[1].device:
            return torch.utils.swap_tensors(args[0], nn.Parameter(args[1].detach(), args[0].requires_grad))
        return function(*args, **(kwargs or {}))


def caller() -> str:
    """Return the innermost function of kairos that is running, as ``module.function``."""
    frame = sys._getframe(1)
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        if any(path.is_relative_to(package) for package in _PACKAGES):
            return f"{path.stem}.{frame.f_code.co_qualname}"
        frame = frame.f_back
    return "no function of kairos"


class Replicated(nn.Module):
    """The network without DistributedDataParallel, whose buckets would need real memory."""

    def __init__(self, module: nn.Module, **_: Any):
        super().__init__()
        self.module = module

    def forward(self, *arguments: Any) -> Any:
        return self.module(*arguments)

    def no_sync(self) -> Any:
        return nullcontext()


@contextmanager
def process_group(ranks: int) -> Iterator[None]:
    """Make this process rank 1 of `ranks` (rank 0 of one) in torch's fake process group, which does not communicate."""
    if ranks > 1:
        distributed.init_process_group("fake", rank=1, world_size=ranks, store=FakeStore())
    try:
        yield
    finally:
        if ranks > 1:
            distributed.destroy_process_group()


@contextmanager
def fake_cuda() -> Iterator[Record]:
    """Let tensors be on a CUDA device that does not exist; yields the record of synchronisations and collectives."""
    record, pinned = Record(), set()
    storages = []  # keeps pinned memory alive, so that its address is not used again

    real_empty = torch.empty

    def to_pinned_memory(tensor: Tensor, *_: Any) -> Tensor:
        copy = tensor.clone()
        storages.append(copy.untyped_storage())
        pinned.add(storages[-1]._cdata)
        return copy

    def empty(*size: Any, pin_memory: bool = False, **options: Any) -> Tensor:
        tensor = real_empty(*size, **options)
        return to_pinned_memory(tensor) if pin_memory else tensor

    def all_gather_object(values: list[Any], value: Any, group: Any = None) -> None:
        record.collectives.append(f"all_gather_object in {caller()}")
        values[:] = [value] * len(values)

    patches = {
        "torch.distributed.all_gather_object": all_gather_object,  # pickles to tensors, which must not be fake
        "torch.nn.parallel.DistributedDataParallel": Replicated,
        "torch.cuda.is_current_stream_capturing": lambda: False,
        "torch.Tensor.pin_memory": to_pinned_memory,
        "torch.empty": empty,
        "torch.Tensor.backward": _backward,
        "torch.autograd.grad": _grad,
        "torch._subclasses.fake_tensor.FakeTensor.tolist": lambda tensor: tensor.cpu().tolist(),
        "torch.cuda.amp.common.amp_definitely_not_available": lambda: False,
        "torch.cuda.is_bf16_supported": lambda *_: True,
        "torch.cuda.get_device_name": lambda *_: "a device that does not exist",
    }
    before = torch.__future__.get_overwrite_module_params_on_conversion()
    torch.__future__.set_overwrite_module_params_on_conversion(True)  # a fake tensor cannot replace a real one's data
    try:
        with ExitStack() as stack:
            for name, replacement in patches.items():
                stack.enter_context(mock.patch(name, replacement))
            stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
            stack.enter_context(_Mode(record, pinned))
            stack.enter_context(_Assignments())
            yield record
    finally:
        torch.__future__.set_overwrite_module_params_on_conversion(before)


def _gradients(output: Tensor) -> dict[Tensor, Tensor]:
    """Compute the gradients of a scalar by leaf tensor.

    Torch's engine requires a CUDA context. The nodes of the graph are real, with torch's formulas.
    """
    with torch.no_grad():
        order = _order(output.grad_fn)
        pending = {output.grad_fn: [torch.ones_like(output)]}
        gradients: dict[Tensor, Tensor] = {}
        for node in order:
            incoming = pending.pop(node, None)
            if incoming is None or all(gradient is None for gradient in incoming):
                continue
            if hasattr(node, "variable"):
                (gradients[node.variable],) = incoming
                continue
            outgoing = node(*incoming)
            outgoing = outgoing if isinstance(outgoing, tuple) else (outgoing,)
            for (following, number), gradient in zip(node.next_functions, outgoing, strict=True):
                if following is not None and gradient is not None:
                    _add(
                        pending.setdefault(following, [None] * len(following._input_metadata)),
                        following,
                        number,
                        gradient,
                    )
    return gradients


def _order(root: Any) -> list[Any]:
    """Return all nodes of a graph in topological order."""
    waiting: dict[Any, int] = {root: 0}
    unseen = [root]
    while unseen:
        for following, _ in unseen.pop().next_functions:
            if following is not None:
                if following not in waiting:
                    waiting[following] = 0
                    unseen.append(following)
                waiting[following] += 1
    order = [root]
    for node in order:
        for following, _ in node.next_functions:
            if following is not None:
                waiting[following] -= 1
                if not waiting[following]:
                    order.append(following)
    return order


def _add(incoming: list[Any], node: Any, number: int, gradient: Tensor) -> None:
    """Add a gradient to the incoming gradients of a node, in the shape and type of the node's tensor."""
    expected = node._input_metadata[number]
    assert gradient.device == expected.device, f"gradient on {gradient.device} of a tensor on {expected.device}"
    if gradient.shape != expected.shape or gradient.dtype != expected.dtype:
        gradient = gradient.sum_to_size(expected.shape).to(expected.dtype)
    incoming[number] = gradient if incoming[number] is None else incoming[number] + gradient


def _backward(output: Tensor, *_: Any, **__: Any) -> None:
    for leaf, gradient in _gradients(output).items():
        leaf.grad = gradient if leaf.grad is None else leaf.grad + gradient


def _grad(outputs: Tensor, inputs: Any, *_: Any, materialize_grads: bool = False, **__: Any) -> tuple[Any, ...]:
    gradients = _gradients(outputs)
    single = isinstance(inputs, Tensor)
    result = [gradients.get(tensor) for tensor in ([inputs] if single else inputs)]
    if materialize_grads:
        result = [
            torch.zeros_like(tensor) if gradient is None else gradient
            for tensor, gradient in zip(inputs, result, strict=True)
        ]
    return tuple(result)
