"""EDM's augmentations, which the network is told of (Karras et al. 2022, appendix F.2; after Karras et al. 2020).

Every image is a function of the seed, the step and its number in the global batch; nothing waits for the device.
"""

import functools
import math

import torch
from torch import Tensor
from torch.nn import functional

from kairos_timesteps.randomness import Stream

# the low-pass filter of Daubechies' least asymmetric wavelet with six vanishing moments; halving undoes doubling
_SYM6 = (
    0.015404109327027373, 0.0034907120842174702, -0.11799011114819057, -0.048311742585633, 0.4910559419267466,
    0.787641141030194, 0.3379294217276218, -0.07263752278646252, -0.021060292512300564, 0.04472490177066578,
    0.0017677118642428036, -0.007800708325034148,
)  # fmt: skip


def augment_images(images: Tensor, p: float, seed: int, step: int, index: range) -> tuple[Tensor, Tensor]:
    """Images (n, c, h, w), and what was done to them, float32 (n, 9).

    Half of the images are flipped in x; each other augmentation happens to an image with probability `p`. Labels are 0
    where nothing was drawn: x flip, y flip, scale, rotation (2), stretch (2), translation (2).

    Args:
        images: of any range of values.
        p: probability of each augmentation.
        seed: of the training.
        step: of the training.
        index: numbers of the images in the global batch.
    """
    device = images.device
    u = Stream(seed, "augment").uniform(step, index, (10,), device).T  # (10, n)
    n = Stream(seed, "augment normal").normal(step, index, (4,), device, torch.float64).T
    happens = (u[:5] < p).double()
    flip_x, flip_y = (u[5] < 0.5).double(), (u[6] < 0.5) * happens[0]
    scale, stretch, shift_x, shift_y = n[0] * happens[1], n[1] * happens[3], n[2] * happens[4], n[3] * happens[4]
    angle = (2 * u[7] - 1) * math.pi * happens[2]
    axis = (2 * u[8] - 1) * math.pi * (u[9] < 0.5)

    for chosen, side in ((flip_x, 3), (flip_y, 2)):
        images = torch.where((chosen > 0)[:, None, None, None], images.flip(side), images)
    # from places in the result to places in the image: the inverse of scaling, then turning, stretching and shifting
    stretched = _rotation(axis) @ _diagonal(2 ** (-0.2 * stretch), 2 ** (0.2 * stretch)) @ _rotation(-axis)
    linear = _diagonal(2 ** (-0.2 * scale), 2 ** (-0.2 * scale)) @ _rotation(angle) @ stretched  # (n, 2, 2)
    shift = torch.stack([shift_x * images.shape[3], shift_y * images.shape[2]], 1) * 0.125  # (n, 2)
    moved = happens[1:].any(0)[:, None, None, None]
    images = torch.where(moved, _warp(images, linear, shift), images)

    turned = [angle.cos() - 1, angle.sin(), stretch * axis.cos(), stretch * axis.sin()]
    return images, torch.stack([flip_x, flip_y, scale, *turned, shift_x, shift_y], 1).float()


def _rotation(angle: Tensor) -> Tensor:
    """Rotations (n, 2, 2) of (x, y)."""
    return torch.stack([angle.cos(), -angle.sin(), angle.sin(), angle.cos()], 1).view(-1, 2, 2)


def _diagonal(x: Tensor, y: Tensor) -> Tensor:
    return torch.diag_embed(torch.stack([x, y], 1))


def _warp(images: Tensor, linear: Tensor, shift: Tensor) -> Tensor:
    """Images whose place q, from the middle in pixels, shows what was at ``linear (q - shift)``; edges reflect.

    As much is reflected as there is, whatever the images of a batch need: they do not depend on each other. As in EDM
    the filter counts as centred on its middle, off which its mass is 0.2 pixels: turned images move by as much.
    """
    channels, height, width = images.shape[1:]
    taps = len(_SYM6)
    kernel = _filter(images.device, images.dtype).expand(channels, 1, 1, taps)
    fine = functional.pad(images, (width - 1, width - 1, height - 1, height - 1), mode="reflect")
    for weights, stride, padding in _by_axis(kernel * math.sqrt(2), (taps - 2) // 2):
        fine = functional.conv_transpose2d(fine, weights, stride=stride, padding=padding, groups=channels)
    # places of the pixels of twice the resolution that halving reads
    x, y = (
        (torch.arange(2 * side + taps - 2, device=images.device, dtype=torch.float64) - side - (taps - 3) / 2) / 2
        for side in (width, height)
    )
    places = torch.stack(torch.meshgrid(x, y, indexing="xy"), -1)  # (fine height, fine width, 2)
    x, y = ((places - shift[:, None, None]) @ linear.transpose(1, 2)[:, None]).unbind(-1)
    grid = torch.stack([4 * x / fine.shape[3], 4 * y / fine.shape[2]], -1).to(images.dtype)
    fine = functional.grid_sample(fine, grid, align_corners=False)
    for weights, stride, _ in _by_axis(kernel / math.sqrt(2), 0):
        fine = functional.conv2d(fine, weights, stride=stride, groups=channels)
    return fine


@functools.cache
def _filter(device: torch.device, dtype: torch.dtype) -> Tensor:
    """The filter, moved to the device once: a step waits for no copy."""
    return torch.tensor(_SYM6, device=device, dtype=dtype)


def _by_axis(kernel: Tensor, padding: int) -> tuple[tuple[Tensor, tuple[int, int], tuple[int, int]], ...]:
    """Weights, stride and padding of a filter along each side."""
    return (kernel, (1, 2), (0, padding)), (kernel.transpose(2, 3), (2, 1), (padding, 0))
