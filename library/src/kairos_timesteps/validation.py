"""Validation loss with fixed images, noise and times, so that runs of different strategies can be compared."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from kairos_timesteps.diffusion.adapters import as_process
from kairos_timesteps.errors import demand
from kairos_timesteps.randomness import Stream

_KINDS = ("even", "mlperf8", "middle8")


@contextmanager
def evaluating(network: Any) -> Iterator[None]:
    """Give a network evaluation mode without a call of ``train()``; restore each module's mode afterwards.

    ``train()`` of some modules does more: it exchanges the weights for averaged ones, or merges LoRA. So the network is
    called with the weights that it has. A network that is no `torch.nn.Module` has no mode and is left as it is.
    """
    modules = network.modules() if isinstance(network, nn.Module) else ()
    training_modules = [module for module in modules if module.training]
    try:
        for module in training_modules:
            module.training = False
        yield
    finally:
        for module in training_modules:
            module.training = True


def spread_over(stratum: tuple[float, float], count: int) -> Tensor:
    """Return a fraction in the stratum for each of `count` images, evenly spread, float64 (count,)."""
    first, end = stratum
    return first + (torch.arange(count, dtype=torch.float64) + 0.5) * (end - first) / count


@dataclass
class ValidationLoss:
    """Squared error of a network on fixed images, at times and with noise that depend on the seed alone.

    The network has evaluation mode, see `evaluating`, and the weights that it has when it is measured. Call its
    ``eval()`` before, if that exchanges them for averaged ones.

    Args:
        images: validation images, (n, ...); any device.
        process: forward process, as for `Strategy`, such as ``strategy.process``.
        kind: ``even``: each image once in each of `strata` equal intervals of the process. ``mlperf8``: each image at
            one of the eight equidistant times 0/8 to 7/8, in turn (MLPerf Training, Flux.1). ``middle8``: likewise at
            1/16 to 15/16, the middles of eight intervals (torchtitan).
        strata: number of intervals.
        of: error of the ``prediction``, or of ``epsilon``, which networks of different predictions share.
        seed: seed of the noise.
        batch: images in one forward pass.
        conditions: conditions of the images, each (n, ...); None: the network is called as ``network(x_t, t)``.
        device: device of the network; None: that of the images.

    Raises:
        ConfigError: no images, conditions of another number of images, or a value that is not allowed.
    """

    images: Tensor
    process: Any = "linear"
    kind: str = "even"
    strata: int = 8
    of: str = "prediction"
    seed: int = 0
    batch: int = 128
    conditions: dict[str, Tensor] | None = None
    device: torch.device | str | None = None

    def __post_init__(self) -> None:
        demand(len(self.images), "images", "none", "one or more")
        demand(self.kind in _KINDS, "kind", repr(self.kind), ", ".join(_KINDS))
        demand(self.of in ("prediction", "epsilon"), "of", repr(self.of), "prediction, epsilon")
        demand(min(self.strata, self.batch) > 0, "strata and batch", f"{self.strata} and {self.batch}", "1 or more")
        for name, values in (self.conditions or {}).items():
            demand(len(values) == len(self.images), f"conditions.{name}", f"{len(values)} rows", f"{len(self.images)}")
        self.process, self.device = as_process(self.process), self.device or self.images.device

    def __call__(self, network: Any, autocast: AbstractContextManager[Any] | None = None) -> dict[str, Any]:
        """Measure the loss of a network in evaluation mode.

        Args:
            network: network of the process.
            autocast: context that the network is called in.

        Returns:
            ``loss``: the mean, with its ``standard_error``. ``by_image``: losses by image, (n,), whose difference
            between two runs varies less than either. By noise level, each (levels,): ``u`` (fraction of the process),
            ``t`` (time of the process), ``level_loss`` and ``level_standard_error``.
        """
        count, even = len(self.images), self.kind == "even"
        strata = self.strata if even else 8
        u = (np.arange(strata) + (self.kind != "mlperf8") / 2) / strata  # middles of the intervals, or lower ends
        if even:
            image, level_indices = np.tile(np.arange(count), strata), np.repeat(np.arange(strata), count)
            times = [spread_over((part / strata, (part + 1) / strata), count) for part in range(strata)]
        else:
            image, level_indices = np.arange(count), np.arange(count) % strata
            times = [torch.from_numpy(u[level_indices])]
        with autocast or nullcontext():
            parts = [
                self.errors(network, noise_number, fractions, self.of) for noise_number, fractions in enumerate(times)
            ]
            losses = torch.cat(parts).numpy()
        with np.errstate(divide="ignore", invalid="ignore"):  # levels without an image
            size = np.bincount(level_indices, minlength=strata)
            level = np.bincount(level_indices, losses, strata) / size
            # within a level, because differences between levels are not noise
            deviations = losses - level[level_indices]
            level_standard_error = np.sqrt(np.bincount(level_indices, deviations**2, strata) / (size * (size - 1)))
            # losses of one image belong together; the factor of `standard_error` corrects for the sum of deviations,
            # which is 0 over all images (even) or in each level
            variance_of_mean = ((np.bincount(image, deviations) / len(deviations)) ** 2).sum()
            standard_error = np.sqrt(variance_of_mean * count / max(count - (1 if even else strata), 0))
        by_image = np.bincount(image, losses) / np.bincount(image)
        levels = {"u": u, "t": self.process.times(u), "level_loss": level, "level_standard_error": level_standard_error}
        return {"loss": float(losses.mean()), "standard_error": float(standard_error), "by_image": by_image, **levels}

    def errors(self, network: Any, number: int, u: Tensor, of: str) -> Tensor:
        """Return the squared error by image at fractions u (n,), with noise `number`, float64 (n,) on the CPU.

        The network is in evaluation mode, without gradients. `of` is ``prediction`` or ``epsilon``.
        """
        noise = Stream(self.seed, "validation noise").normal(number, range(len(u)), tuple(self.images.shape[1:]))
        errors, process = [], self.process
        with evaluating(network), torch.inference_mode():
            for part in (slice(start, start + self.batch) for start in range(0, len(u), self.batch)):
                conditions = self.conditions and {k: v[part].to(self.device) for k, v in self.conditions.items()}
                x0, eps, fraction = (values[part].to(self.device) for values in (self.images, noise, u))
                t = process.times(fraction)
                x_t = process.noised(x0, eps, t)
                output = process.predict(network, x_t, t, conditions)
                output = process.prediction_channels(output, x_t).to(x_t.dtype)
                if of == "epsilon":
                    difference = process.epsilon(output, x_t, t) - eps
                else:
                    difference = output - process.target(x0, eps, t)
                errors.append(difference.double().square().flatten(1).mean(1).cpu())  # (batch,)
        return torch.cat(errors)
