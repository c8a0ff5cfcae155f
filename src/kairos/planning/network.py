"""What a forward and a backward pass of a backbone cost, counted on tensors that have a shape and no content.

The backbone itself is built and called, so that whatever is registered is counted as it is: parameters exactly,
floating-point operations as `torch.utils.flop_counter` has them (2 per multiplication with addition, of matrix
products, convolutions and attention).
"""

from dataclasses import dataclass
from typing import Any

from kairos.planning.data import Shape


@dataclass(frozen=True)
class Network:
    """A backbone and one pass of a batch through it.

    Attributes:
        parameters: numbers that are trained.
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
    weights: int
    tensors: int
    value_bytes: int
    samples: int
    forward: int
    backward: int
    traffic: int
    activations: int


def measure(
    model: dict[str, Any], x0: Shape, conditions: dict[str, dict[str, Any]], samples: int, precision: str = "fp32"
) -> Network:
    """Count a pass.

    Args:
        model: section `model` of an experiment.
        x0: channels, height and width.
        conditions: descriptions of the conditions that the network takes.
        samples: images in the pass.
        precision: as in section `training`.

    Raises:
        KairosError: the model does not fit x0.
    """
    import torch

    from kairos import models
    from kairos.models.registries import MODELS
    from kairos.planning.counting import Gpu, Kept, Operations, shapes_only

    dtype = torch.float64 if precision == "fp64" else torch.float32
    forward, backward = Operations(), Operations()
    MODELS.entry(model["name"]).load()  # imports must find torch as it is
    with shapes_only():
        network = models.build(model, x0, conditions).to(dtype).train()
        weights, kept = network.weights().values(), Kept(network)
        x, t = torch.empty(samples, *x0, dtype=dtype), torch.zeros(samples, dtype=torch.int64)
        given = {name: _values(item, samples) for name, item in conditions.items()}
        with forward, torch.autograd.graph.saved_tensors_hooks(kept, lambda tensor: tensor), Gpu(precision):
            output = network(x, t, given)
        with backward:
            output.float().square().mean().backward()
    trained = sum(parameter.numel() for parameter in network.parameters() if parameter.requires_grad)
    return Network(
        parameters=trained,
        weights=sum(value.numel() for value in weights),
        tensors=len(weights),
        value_bytes=dtype.itemsize,
        samples=samples,
        forward=forward.count,
        backward=backward.count,
        traffic=forward.bytes + backward.bytes,
        activations=kept.bytes,
    )


def _values(description: dict[str, Any], samples: int) -> Any:
    """A condition of every sample, without content."""
    import torch

    if description["kind"] == "class":
        return torch.zeros(samples, dtype=torch.int64)
    return torch.empty(samples, *description["shape"])
