"""Rows that say what a distance means, each compared with the same reference as the samples.

* ``floor``: held-out images; no model can be expected below it.
* ``reconstruction``: the same held-out images through the autoencoder.
* ``gaussian``: a Gaussian with mean and covariance of the training latents, sampled and decoded.
* ``noise``: uniformly random pixels.

All have as many images per set as the samples, the first two as many as are held out where those are fewer.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from kairos.data.dataset import PreparedDataset, to_uint8
from kairos.evaluation import metrics
from kairos.evaluation.extractors import Extractor
from kairos.evaluation.metrics import Target
from kairos.evaluation.moments import BATCH, Captioned, in_batches, measure
from kairos.evaluation.settings import EvaluationConfig
from kairos.progress import Progress, say
from kairos.randomness import Stream, derived_seed

RESAMPLES = 20
GAUSSIAN_IMAGES = 10_000
GAUSSIAN_VALUES = 2**27  # 512 MB of float32
_HELD_OUT = f"standard deviation over {RESAMPLES} bootstrap resamples of the one set of held-out images"
_DRAWN = "standard deviation over sets of fresh draws"
SPREADS = {"floor": _HELD_OUT, "reconstruction": _HELD_OUT, "gaussian": _DRAWN, "noise": _DRAWN}

Images = Iterator[NDArray[np.uint8]]


def rows_of(
    evaluation: EvaluationConfig,
    dataset: PreparedDataset,
    codec: Any,
    gaussian: "Gaussian",
    extractor: Extractor,
    target: Target,
) -> dict[str, dict[str, Any]]:
    """The rows that can be made, by name, each with its number of images per set and the columns of the metrics."""
    from kairos.autoencoders.quality import reconstructions

    heldout = dataset.heldout[: evaluation.num_samples]
    one_set = {
        "floor": lambda: in_batches(dataset.images, heldout),
        "reconstruction": lambda: reconstructions(codec, dataset, heldout, BATCH),
    }
    if len(heldout) <= extractor.width:
        say(
            f"reference: rows floor and reconstruction are left out: {len(heldout)} images are held out, and "
            f"{extractor.width} features need more"
        )
        one_set = {}
    elif len(heldout) < evaluation.num_samples:
        say(f"warning: rows floor and reconstruction are of {len(heldout)} images, all that are held out")
    drawn = {
        "gaussian": lambda number: gaussian.decoded(codec, evaluation.num_samples, evaluation.seed, number),
        "noise": lambda number: _noise(dataset.images.shape[1:], evaluation.num_samples, evaluation.seed, number),
    }

    def captioned(images: Callable[[], Images]) -> Captioned | None:
        captions = dataset.captions
        if captions is None or "captions" not in target.needs:
            return None
        return Captioned(images, captions.texts(captions.numbers(heldout)), extractor.device)

    rows = {}
    progress = Progress(len(one_set) + len(drawn), "reference", "row")
    with torch.inference_mode():
        for name, images in one_set.items():
            measured = replace(measure(extractor, images(), target.needs | {"features"}), captioned=captioned(images))
            scores = target.score(measured)
            spread = metrics.bootstrap(measured, target, RESAMPLES, derived_seed(evaluation.seed, "bootstrap"))
            spreads = {f"{column}_spread": spread if column == target.metric else None for column in scores}
            rows[name] = {"n_samples": len(heldout), **scores, **spreads}
            progress.advance()
        for name, set_of in drawn.items():
            sets = (measure(extractor, set_of(number), target.needs) for number in range(evaluation.sets))
            rows[name] = {"n_samples": evaluation.num_samples, **metrics.summarise([target.score(one) for one in sets])}
            progress.advance()
    progress.close()
    return rows


@dataclass(frozen=True)
class Gaussian:
    """A Gaussian with mean and sample covariance of the training latents, whatever their dimension.

    Draws are mean + z rows / sqrt(n-1) with z ~ N(0, I_n) and the centred latents as rows: exactly that covariance,
    full where there are more latents than dimensions, of rank n-1 otherwise, without ever forming it.

    Args:
        mean: of the latents in model space, (d,).
        rows: centred latents, (n, d).
        shape: of one latent, (c, h, w).
    """

    mean: torch.Tensor
    rows: torch.Tensor
    shape: tuple[int, ...]

    @staticmethod
    def fit(latents: Any, seed: int) -> "Gaussian":
        """From training latents as a training sees them, at most `GAUSSIAN_IMAGES`, fewer where they are large."""
        dimension = int(np.prod(latents.shape))
        count = min(len(latents.train), GAUSSIAN_IMAGES, max(2, GAUSSIAN_VALUES // dimension))
        order = Stream(seed, "gaussian images").permutation(len(latents.train))
        chosen = latents.train[order[:count].sort().values.numpy()]
        parts = []
        for part in np.split(chosen, range(BATCH, count, BATCH)):
            noise = Stream(seed, "gaussian latents").normal(0, torch.from_numpy(part), latents.shape)
            parts.append(latents.batch(part, noise=noise).flatten(1))
        rows = torch.cat(parts)  # (n, d)
        mean = rows.mean(0)
        return Gaussian(mean, rows - mean, tuple(latents.shape))

    def decoded(self, codec: Any, count: int, seed: int, number: int) -> Images:
        """Set `number` of draws as images, batches of uint8 (n, height, width, channels)."""
        for start in range(0, count, BATCH):
            part = range(start, min(start + BATCH, count))
            z = Stream(seed, "gaussian draws").normal(number, part, (len(self.rows),))
            latents = self.mean + z @ self.rows / (len(self.rows) - 1) ** 0.5
            yield to_uint8(codec.decode(latents.view(-1, *self.shape)))


def _noise(shape: tuple[int, ...], count: int, seed: int, number: int) -> Images:
    """Set `number` of uniformly random pixels."""
    random = np.random.default_rng(derived_seed(seed, "noise images", number))
    for start in range(0, count, BATCH):
        yield random.integers(0, 256, (min(BATCH, count - start), *shape), dtype=np.uint8)
