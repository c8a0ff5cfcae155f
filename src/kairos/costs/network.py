"""Costs of a forward and a backward pass of a backbone, counted on tensors that have a shape and no content.

The backbone itself is built and called, so a registered backbone is counted as it is. Parameters are exact.
Floating-point operations are those of `torch.utils.flop_counter`: 2 per multiplication with addition, of matrix
products, convolutions and attention.
"""

from dataclasses import dataclass
from typing import Any

from kairos.costs.dataset_size import Shape


@dataclass(frozen=True)
class Network:
    """A backbone and one pass of a batch through it.

    Attributes:
        parameters: numbers that are trained.
        fixed: those that published counts have beside them, such as positions.
        weights: numbers that are kept, with fixed ones such as positions.
        tensors: number of tensors that these are in.
        value_bytes: bytes of a number.
        samples: images of the pass.
        forward: floating-point operations of the forward pass.
        backward: of the backward pass.
        traffic: bytes that all operations of both passes read and write, each on its own.
        activations: bytes kept from the forward to the backward pass, with copies of weights in another precision.
    """

    parameters: int
    fixed: int
    weights: int
    tensors: int
    value_bytes: int
    samples: int
    forward: int
    backward: int
    traffic: int
    activations: int


def measure(
    model: dict[str, Any],
    x0: Shape,
    conditions: dict[str, dict[str, Any]],
    samples: int,
    precision: str = "fp32",
    outputs: int | None = None,
) -> Network:
    """Count a pass. In fp64 every number of fp32 takes twice the bytes.

    Args:
        model: section `model` of an experiment.
        x0: channels, height and width.
        conditions: descriptions of the conditions that the network takes.
        samples: images in the pass.
        precision: as in section `training`.
        outputs: channels of what it gives; None: those of x0.

    Raises:
        KairosError: the model does not fit x0.
    """
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves
    from torch.utils.flop_counter import FlopCounterMode

    from kairos import models
    from kairos.models.registries import MODELS

    class Traffic(TorchDispatchMode):
        """Bytes that each operation reads and writes."""

        bytes = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = func(*args, **(kwargs or {}))
            if func.namespace == "aten" and not func.is_view:
                touched = tree_leaves((args, kwargs, result))
                self.bytes += sum(leaf.nbytes for leaf in touched if isinstance(leaf, torch.Tensor))
            return result

    kept: set[torch.UntypedStorage] = set()

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept.add(tensor.untyped_storage())
        return tensor

    MODELS.entry(model["name"]).load()  # imports must find torch as it is
    traffic, forward, backward = Traffic(), FlopCounterMode(display=False), FlopCounterMode(display=False)
    with FakeTensorMode():  # of the meta device, but said to be a processor's: there is no autocast for meta
        network = models.build(model, x0, conditions, outputs).train()
        if precision == "bf16":  # a GPU normalises in float32, a processor, which these tensors are said to be on, not
            for part in network.modules():
                if isinstance(part, torch.nn.GroupNorm):
                    part.register_forward_pre_hook(lambda _, given: (given[0].float(),))
        x, t = torch.empty(samples, *x0), torch.zeros(samples, dtype=torch.int64)
        given = {
            name: torch.zeros_like(t) if item["kind"] == "class" else torch.empty(samples, *item["shape"])
            for name, item in conditions.items()
        }
        autocast = torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16")
        with forward, traffic, torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor), autocast:
            output = network(x, t, given)
        with backward, traffic:
            output.float().square().mean().backward()
        parameters, weights = list(network.parameters()), network.weights().values()
        own = {value.untyped_storage() for value in (*parameters, *network.buffers())}
    double = 2 if precision == "fp64" else 1
    return Network(
        parameters=sum(value.numel() for value in parameters if value.requires_grad),
        fixed=sum(value.numel() for value in parameters if not value.requires_grad),
        weights=sum(value.numel() for value in weights),
        tensors=len(weights),
        value_bytes=4 * double,
        samples=samples,
        forward=forward.get_total_flops(),
        backward=backward.get_total_flops(),
        traffic=traffic.bytes * double,
        activations=sum(storage.nbytes() for storage in kept - own) * double,
    )
