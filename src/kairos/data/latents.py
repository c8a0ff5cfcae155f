"""Training data in model space: moments of latents, or pixels if there is no autoencoder.

Model space is x0 = (z − shift) · scale, with mean 0 and standard deviation 1 over the training images.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float

from kairos.array_shapes import FlagArray, IntegerArray
from kairos.data.arrays import ArrayFile, open_array
from kairos.data.captions import EncodedCaptions, open_encoded_captions
from kairos.data.dataset import HeldoutIndices, PreparedDataset, TrainIndices, open_dataset
from kairos.data.pixels import reduce_resolution, to_float
from kairos.files import open_record
from kairos.finite import demand_finite
from kairos.shapes import Images, Rows
from kairos_timesteps.errors import KairosError

_MOST_MEASURED = 2000  # images that `Latents.measure_sigma_data` reads
_REMEDY = "make the latents and the data set again from intact sources"
_SMALL_BYTES = 16 * 2**20  # largest array that `Latents.with_small_arrays_in_memory` loads

Moments = Float[np.ndarray, "images channels height width"]


@dataclass(frozen=True)
class Latents:
    """Latents or pixels of all images of a data set, with their split and conditions.

    Attributes:
        record: record of stage encode.
        dataset: the data set that was encoded.
        moments: arrays of float32 or float16 (count, c, h, w) by name, in files or in memory; empty for pixels. Names
            are ``mean``, ``logvar``, ``low_mean`` (of images in low resolution), and ``mean_flipped`` and so on.
        text: encoded captions; None if captions were not encoded.
    """

    record: dict[str, Any]
    dataset: PreparedDataset
    moments: Mapping[str, ArrayFile | Moments]
    text: EncodedCaptions | None = None

    @property
    def shape(self) -> tuple[int, int, int]:
        """Channels, height and width of x0."""
        channels, height, width = self.record["shape"]
        return channels, height, width

    @property
    def train(self) -> TrainIndices:
        """Indices of the training images among all images of the data set, increasing, int64."""
        return self.dataset.train

    @property
    def heldout(self) -> HeldoutIndices:
        """Indices of the held-out images among all images of the data set, increasing, int64."""
        return self.dataset.heldout

    @property
    def can_flip(self) -> bool:
        """True if flipped images are allowed and were encoded, so that `read_rows` accepts flips."""
        return bool(self.record["flips"])

    @property
    def stochastic(self) -> bool:
        """True if x0 is a sample from a distribution per image, so that `compute_x0` uses noise."""
        return "logvar" in self.moments

    @property
    def condition_kinds(self) -> dict[str, dict[str, Any]]:
        """Description of each condition by name, as in the record, such as ``{"kind": "class", "num_classes": 10}``.

        The description of ``text`` (encoded captions) also contains ``empty``, the state of an empty caption.
        """
        kinds: dict[str, dict[str, Any]] = dict(self.record["conditions"])
        if self.text is not None:
            kinds["text"] = {**kinds["text"], "empty": self.text.empty}
        return kinds

    @property
    def are_in_memory(self) -> bool:
        """True if `read_rows` and `load_conditions` read no file.

        It is False with encoded captions and, for pixels, with linked images.
        """
        if self.text is not None:  # encoded captions stay in their file
            return False
        arrays_of_x0 = self.moments.values() or [self.dataset.images]  # without moments, x0 is the pixels
        arrays = [*self.dataset.conditions.values(), *arrays_of_x0]
        return all(isinstance(array, np.ndarray) for array in arrays)

    def with_small_arrays_in_memory(self) -> "Latents":
        """Return a copy of this object with each moment and condition of at most 16 MiB in memory.

        Larger arrays and encoded captions stay in their files. If x0 is pixels, the limit also applies to the images of
        the data set; linked images are never loaded.
        """
        moments = {name: _read_if_small(array) for name, array in self.moments.items()}
        conditions = {name: _read_if_small(array) for name, array in self.dataset.conditions.items()}
        images = self.dataset.images if self.moments else _read_if_small(self.dataset.images)
        return replace(self, moments=moments, dataset=replace(self.dataset, conditions=conditions, images=images))

    def read_rows(self, indices: Any, flips: FlagArray | None = None) -> dict[str, Rows]:
        """Read pixels or moments of some images, from which `compute_x0` computes x0.

        Pixels are flipped in memory. Moments of flipped images were encoded, and are read in place of the others.

        Args:
            indices: indices of the images, (n,).
            flips: True for each image to flip, bool (n,); None: none.

        Returns:
            Tensors by name, on the CPU. Without an autoencoder: ``pixels``, uint8 (n, h, w, c). Otherwise ``mean``, and
            ``logvar`` and ``low_mean`` if they were encoded, each float32 (n, c, h, w).

        Raises:
            KairosError: `flips` selects images, but flipped images were not encoded.
            NotFiniteError: a moment is not finite.
        """
        indices = np.asarray(indices)
        flips = np.zeros(len(indices), bool) if flips is None else np.asarray(flips)
        if flips.any() and not self.can_flip:
            raise KairosError("dataset.flips: is false, so there are no flipped images to train on")
        if not self.moments:
            pixels = self.dataset.images[indices]  # a copy, also of images in memory
            pixels[flips] = pixels[flips, :, ::-1]  # axes: image, height, width, channel
            return {"pixels": torch.from_numpy(pixels)}
        rows: dict[str, Rows] = {}
        for name in ("mean", "logvar", "low_mean"):
            if name not in self.moments:
                continue
            moment = np.empty((len(indices), *self.shape), np.float32)
            moment[~flips] = self.moments[name][indices[~flips]]
            if flips.any():
                moment[flips] = self.moments[f"{name}_flipped"][indices[flips]]
            demand_finite(moment, f"latents of {self.dataset.folder}: {name} of {len(indices)} images", _REMEDY)
            rows[name] = torch.from_numpy(moment)
        return rows

    def compute_x0(self, rows: dict[str, Rows], noise: Images | None = None) -> Images:
        """Compute x0 in model space, (n, c, h, w), from pixels or moments, on their device.

        The result is float32 for pixels, and has the type of the moments otherwise.

        Args:
            rows: result of `read_rows`, on any device.
            noise: standard normal noise (n, c, h, w), for a sample from the moments; None: their mean. Ignored for
                pixels and for moments without a variance.
        """
        z = to_float(rows["pixels"]) if "pixels" in rows else rows["mean"]
        if noise is not None and self.stochastic:
            std = (0.5 * rows["logvar"]).exp()
            if z.device.type == "cpu":
                z = z + std * noise
            else:
                z = torch.addcmul(z, std, noise)  # one kernel; rounds once less, so that the bits differ from the CPU's
        return self._in_model_space(z)

    def compute_low_resolution(self, rows: dict[str, Rows]) -> Images:
        """Compute condition ``low_resolution`` in model space, float32 (n, c, h, w), from the result of `read_rows`.

        If latents of the images in low resolution were encoded, their means are used. Otherwise the resolution of the
        pixels is reduced by `reduce_resolution`.
        """
        if "low_mean" in rows:
            return self._in_model_space(rows["low_mean"])
        # without an autoencoder, model space has shift 0 and scale 1
        return reduce_resolution(to_float(rows["pixels"]), self.condition_kinds["low_resolution"]["factor"])

    def _in_model_space(self, z: Images) -> Images:
        """Return (z − shift) · scale, with shift and scale of the record; on a GPU the result may be `z` itself."""
        shift, scale = self.record["shift_factor"], self.record["scaling_factor"]
        # a GPU skips the shift 0 and the scale 1 of pixels, to save the launch of two kernels
        on_cpu = z.device.type == "cpu"
        x0: Images = z
        if on_cpu or shift != 0:
            x0 = x0 - shift
        if on_cpu or scale != 1:
            x0 = x0 * scale
        return x0

    def load_x0(self, indices: Any, flips: FlagArray | None = None, noise: Images | None = None) -> Images:
        """Read images and compute their x0 on the CPU, float32 (n, c, h, w); see `read_rows` and `compute_x0`."""
        return self.compute_x0(self.read_rows(indices, flips), noise)

    def load_conditions(
        self, indices: Any, flips: FlagArray | None = None, caption_numbers: IntegerArray | None = None
    ) -> dict[str, Rows]:
        """Load all conditions of some images by name, on the CPU, each with a row per image.

        Encoded captions are float32 (n, *shape) under ``text``.

        Args:
            indices: indices of the images, (n,).
            flips: True for each image to flip, with its conditions that are images, bool (n,); None: none.
            caption_numbers: which of an image's captions to use, modulo their number, int64 (n,); None: the first.
        """
        conditions = self.load_stored_conditions(indices, flips, caption_numbers)
        if "low_resolution" in self.condition_kinds:
            conditions["low_resolution"] = self.compute_low_resolution(self.read_rows(indices, flips))
        return conditions

    def load_stored_conditions(
        self, indices: Any, flips: FlagArray | None = None, caption_numbers: IntegerArray | None = None
    ) -> dict[str, Rows]:
        """Load all conditions except ``low_resolution``, which is computed from the images, by name.

        Conditions of kind ``image`` are flipped with the images. ``text`` is included if captions were encoded. See
        `load_conditions` for the arguments and tensors.

        Raises:
            NotFiniteError: a value is not finite.
        """
        indices = np.asarray(indices)
        conditions = {}
        for name, values in self.dataset.conditions.items():
            rows = values[indices]  # a copy, also of an array in memory
            if flips is not None and self.condition_kinds[name]["kind"] == "image":
                rows[flips] = rows[flips][..., ::-1]  # the last axis is the width
            conditions[name] = torch.from_numpy(rows)
        if self.text is not None and self.dataset.captions is not None:
            caption_indices = self.dataset.captions.caption_indices(indices, caption_numbers)
            states = self.text.states[caption_indices].astype(np.float32, copy=False)
            conditions["text"] = torch.from_numpy(states)
        for name, condition in conditions.items():
            what = f"{self.dataset.folder}: condition {name} of {len(indices)} images"
            demand_finite(condition.numpy(), what, _REMEDY)
        return conditions

    def measure_sigma_data(self) -> float:
        """Return the standard deviation of x0 over all elements of the training images, to four significant digits.

        At most 2,000 training images are read, evenly spaced. The variance of stochastic latents is included. Flipped
        images are not measured. The computation is in float64 for latents, and in float32 for pixels.
        """
        count = min(len(self.train), _MOST_MEASURED)
        positions = np.linspace(0, len(self.train) - 1, count).astype(np.int64)
        rows = {}
        for name, values in self.read_rows(self.train[positions]).items():
            rows[name] = values if name == "pixels" else values.double()  # float64: precise sums of latents
        # law of total variance: the variance of the means plus the mean of the variances
        variance = self.compute_x0(rows).var(correction=0)
        if "logvar" in rows:
            variance = variance + rows["logvar"].exp().mean() * self.record["scaling_factor"] ** 2
        return float(f"{float(variance.sqrt()):.4g}")  # four significant digits


def _read_if_small(array: Any) -> Any:
    """Return the content of an array file of at most 16 MiB; return any other argument unchanged."""
    is_small = isinstance(array, ArrayFile) and math.prod(array.shape) * array.dtype.itemsize <= _SMALL_BYTES
    return array[:] if is_small else array


def open_latents(folder: Path | str) -> Latents:
    """Open the folder that stage encode wrote, with its data set, and its encoded captions if there are any.

    Data set and captions are in other folders, whose paths are in the record. Images and moments are read from files
    on access.

    Raises:
        KairosError: the folder, its data set or its encoded captions are missing or incomplete, or do not belong
            together.
        DamagedError: a record is damaged, or an array file ends early.
    """
    folder = Path(folder)
    command = f"encode --config F --out {folder}"
    record = open_record(folder, command)
    dataset = open_dataset(folder / record["dataset"])
    if dataset.record["content_sha256"] != record["dataset_sha256"]:
        raise KairosError(
            f"{folder}: was made from another version of {dataset.folder}; make it with: kairos {command}"
        )
    moments = {Path(name).stem: open_array(folder / name, command) for name in record["files"]}
    text = open_encoded_captions(folder / record["text"], dataset) if "text" in record else None
    if text is not None and text.record["content_sha256"] != record["text_sha256"]:
        raise KairosError(f"{folder}: was made with other texts than are now there; make it with: kairos {command}")
    return Latents(record=record, dataset=dataset, moments=moments, text=text)
