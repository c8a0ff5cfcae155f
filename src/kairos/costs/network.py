"""Cost of a forward and a backward pass of a backbone, counted on tensors that have a shape and no content.

The backbone is built and called, so every registered backbone can be counted. Numbers of parameters are exact.
Floating-point operations are the counts of `torch.utils.flop_counter`. It counts 2 per multiplication with addition, in
matrix products, convolutions and attention. torch has no count of the bytes that operations move.
"""

from dataclasses import dataclass
from typing import Any

from kairos.costs.dataset_size import Shape
from kairos.models.settings import BackboneOptions


@dataclass(frozen=True)
class NetworkCost:
    """Size of a backbone, and cost of one forward and backward pass of a micro-batch.

    Attributes:
        parameters: number of trained values.
        fixed_parameters: number of values that are parameters but not trained, such as fixed position embeddings.
        saved_values: number of values in saved weights, fixed ones included.
        saved_tensors: number of tensors in saved weights.
        bytes_per_value: bytes of a weight.
        samples: images of the micro-batch.
        forward_flops: floating-point operations of the forward pass.
        backward_flops: floating-point operations of the backward pass.
        bytes_moved: bytes that all operations of both passes read and write, without fusion of operations.
        activation_bytes: bytes kept from the forward for the backward pass, with copies of weights in lower precision.
    """

    parameters: int
    fixed_parameters: int
    saved_values: int
    saved_tensors: int
    bytes_per_value: int
    samples: int
    forward_flops: int
    backward_flops: int
    bytes_moved: int
    activation_bytes: int


def count_network_cost(
    model: BackboneOptions,
    x0_shape: Shape,
    conditions: dict[str, dict[str, Any]],
    samples: int,
    precision: str = "fp32",
    output_channels: int | None = None,
) -> NetworkCost:
    """Count the cost of a forward and a backward pass of a backbone, without memory or computation for its tensors.

    For precision bf16, the passes run under bf16 autocast. For all others they run in fp32; the bytes are doubled for
    fp64. The loss of the backward pass is the mean square of the output.

    Args:
        model: the backbone with its options.
        x0_shape: channels, height and width of the input.
        conditions: descriptions of the conditions that the network takes, by name, see `DatasetSize`.
        samples: images of the micro-batch.
        precision: precision of training, as in section `training`.
        output_channels: channels of the output; None: the input's.

    Raises:
        KairosError: the model does not fit `x0_shape`.
    """
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves
    from torch.utils.flop_counter import FlopCounterMode

    from kairos import models

    # counters of moved bytes, of tensors kept for the backward pass, and of operations; defined after importing torch
    class ByteCounter(TorchDispatchMode):
        """Sum in `bytes` the bytes that each operation reads and writes; views of tensors move no bytes."""

        bytes = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = func(*args, **(kwargs or {}))
            if func.namespace == "aten" and not func.is_view:
                leaves = tree_leaves((args, kwargs, result))
                self.bytes += sum(leaf.nbytes for leaf in leaves if isinstance(leaf, torch.Tensor))
            return result

    saved_storages: set[torch.UntypedStorage] = set()  # tensors that share memory count once

    def record_saved(tensor: torch.Tensor) -> torch.Tensor:
        saved_storages.add(tensor.untyped_storage())
        return tensor

    saved_hooks = torch.autograd.graph.saved_tensors_hooks(record_saved, lambda tensor: tensor)
    byte_counter = ByteCounter()  # type: ignore[no-untyped-call]  # its base, in torch, declares no types
    forward_counter, backward_counter = FlopCounterMode(display=False), FlopCounterMode(display=False)

    # the passes
    model.load()  # before FakeTensorMode: imported modules must see the usual torch
    autocast = torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16")
    with FakeTensorMode():  # tensors without content whose device is "cpu": autocast does not support "meta"
        network = models.build(model, x0_shape, conditions, output_channels).train()
        if precision == "bf16":
            _normalise_in_float32(network)
        x, t = torch.empty(samples, *x0_shape), torch.zeros(samples, dtype=torch.int64)
        condition_values = _create_condition_values(conditions, samples)
        with forward_counter, byte_counter, saved_hooks, autocast:
            output = network(x, t, condition_values)
        with backward_counter, byte_counter:
            output.float().square().mean().backward()
        parameters, weights = list(network.parameters()), network.weights().values()
        network_storages = {value.untyped_storage() for value in (*parameters, *network.buffers())}

    # sums
    byte_factor = 2 if precision == "fp64" else 1
    # weights and buffers are saved for the backward pass, but are no activations
    activation_storages = saved_storages - network_storages
    return NetworkCost(
        parameters=sum(value.numel() for value in parameters if value.requires_grad),
        fixed_parameters=sum(value.numel() for value in parameters if not value.requires_grad),
        saved_values=sum(value.numel() for value in weights),
        saved_tensors=len(weights),
        bytes_per_value=4 * byte_factor,
        samples=samples,
        forward_flops=forward_counter.get_total_flops(),
        backward_flops=backward_counter.get_total_flops(),
        bytes_moved=byte_counter.bytes * byte_factor,
        activation_bytes=sum(storage.nbytes() for storage in activation_storages) * byte_factor,
    )


def _normalise_in_float32(network: Any) -> None:
    """Make all group normalisations of a network cast their input to float32, as autocast does on a GPU.

    Each gets a hook, because autocast does not cast the input on the CPU, the device of the counted tensors.
    """
    import torch

    for module in network.modules():
        if isinstance(module, torch.nn.GroupNorm):
            module.register_forward_pre_hook(lambda _, inputs: (inputs[0].float(),))


def _create_condition_values(conditions: dict[str, dict[str, Any]], samples: int) -> dict[str, Any]:
    """Return a batch of tensors for each condition, by name: class 0, int64 (samples,), or values without content.

    Values have the shape of the condition's description, with `samples` in front.
    """
    import torch

    values = {}
    for name, description in conditions.items():
        if description["kind"] == "class":
            values[name] = torch.zeros(samples, dtype=torch.int64)
        else:
            values[name] = torch.empty(samples, *description["shape"])
    return values
