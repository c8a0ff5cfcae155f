"""What is measured of samples beside the real images that their conditions come from."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kairos.errors import KairosError
from kairos.evaluation.moments import BATCH
from kairos.registry import NoOptions
from kairos.sampling.drawn_conditions import told_of

Pairs = Iterable[tuple[NDArray[np.uint8], NDArray[np.uint8]]]


@dataclass(frozen=True)
class Told:
    """What a model was told of its samples.

    Args:
        latents: what it was trained on.
        conditions: descriptions of those that it takes.
        protocol: of the samples.
    """

    latents: Any
    conditions: dict[str, dict[str, Any]]
    protocol: dict[str, Any]

    def pairs(self, images: Any, part: range) -> Pairs:
        """The samples `part` of `images` and the real images of their conditions, batches of uint8 (n, h, w, channels).

        Raises:
            KairosError: the samples do not say how their conditions were chosen.
        """
        if "labels" not in self.protocol:
            raise KairosError("evaluation.metrics: psnr needs samples whose file says what they show: kairos sample's")
        for batch in (part[start : start + BATCH] for start in range(0, len(part), BATCH)):
            origin = told_of(self.latents, batch, self.conditions, self.protocol["labels"], self.protocol["seed"])
            yield images[batch.start : batch.stop], self.latents.dataset.images[origin]


def psnr(options: NoOptions, pairs: Pairs) -> dict[str, float]:
    """Mean over images of the peak signal-to-noise ratio in dB."""
    errors = [np.square(one.astype(float) - other).mean((1, 2, 3)) for one, other in pairs]  # each (n,)
    return {"psnr": float(np.mean(10 * np.log10(255**2 / np.concatenate(errors).clip(1e-12))))}
