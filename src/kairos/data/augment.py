"""EDM's augmentations with labels that condition the network (Karras et al. 2022, appendix F.2; Karras et al. 2020).

The augmentation of an image is a function of seed, step and the image's index in the global batch. Nothing here
synchronises with the device.
"""

import functools
import math

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional

from kairos.shapes import Images, PerSample, Vector
from kairos_timesteps.randomness import Stream

AugmentationLabels = Float[Tensor, "batch labels"]  # labels that the network takes as a condition
Matrices = Float[Tensor, "batch 2 2"]  # linear map of each image
Translations = Float[Tensor, "batch 2"]  # translation (x, y) of each image
FilterBank = Float[Tensor, "channels 1 _ _"]  # a filter for each channel

# low-pass filter of Daubechies' least asymmetric wavelet with six vanishing moments; downsampling with it inverts
# upsampling with it
_SYM6 = (
    0.015404109327027373, 0.0034907120842174702, -0.11799011114819057, -0.048311742585633, 0.4910559419267466,
    0.787641141030194, 0.3379294217276218, -0.07263752278646252, -0.021060292512300564, 0.04472490177066578,
    0.0017677118642428036, -0.007800708325034148,
)  # fmt: skip
_SCALE_STD = 0.2  # standard deviation of log2 of the scale
_STRETCH_STD = 0.2  # standard deviation of log2 of the stretch
_SHIFT_STD = 0.125  # standard deviation of a translation, as a fraction of the image's side


def augment_images(
    images: Images, p: float, seed: int, step: int, sample_indices: range
) -> tuple[Images, AugmentationLabels]:
    """Return augmented images, with the shape and type of `images`, and their augmentation labels, float32 (n, 9).

    Each image is flipped in x with probability 1/2, and in y with probability `p` / 2. Scale, rotation, stretch and
    translation are each applied with probability `p`. `images` itself does not change. Labels, in this order, are 0 for
    augmentations that are not applied:

    * x flip and y flip, 1 for a flipped image;
    * log2 of the scale, in standard deviations;
    * cosine - 1 and sine of the rotation angle;
    * log2 of the stretch, in standard deviations, times cosine and sine of the stretch axis;
    * translation in x and y, in standard deviations.

    Args:
        images: images (n, c, h, w) with any range of values.
        p: probability of each augmentation other than the flips.
        seed: seed of the training run.
        step: training step.
        sample_indices: indices of the images in the global batch.
    """
    # random numbers of each image
    device = images.device
    u = Stream(seed, "augment").uniform(step, sample_indices, (10,), device).T  # (10, n)
    normal = Stream(seed, "augment normal").normal(step, sample_indices, (4,), device, torch.float64).T  # (4, n)
    applied = (u[:5] < p).double()  # 0 or 1, (5, n)
    flip_y_applied, scale_applied, rotation_applied, stretch_applied, shift_applied = applied
    u_flip_x, u_flip_y, u_angle, u_axis, u_axis_rotated = u[5:]
    normal_scale, normal_stretch, normal_shift_x, normal_shift_y = normal

    # strength of each augmentation, float64 (n,); 0 where it is not applied
    flip_x = (u_flip_x < 0.5).double()
    flip_y = (u_flip_y < 0.5) * flip_y_applied  # as in EDM, half of the applied y flips keep the image
    scale = normal_scale * scale_applied
    angle = (2 * u_angle - 1) * math.pi * rotation_applied
    stretch = normal_stretch * stretch_applied
    stretch_axis = (2 * u_axis - 1) * math.pi * (u_axis_rotated < 0.5)  # angle; 0, along x, with probability 1/2
    shift_x = normal_shift_x * shift_applied
    shift_y = normal_shift_y * shift_applied

    # flips, then one affine map for all other augmentations
    images = torch.where((flip_x > 0)[:, None, None, None], images.flip(3), images)
    images = torch.where((flip_y > 0)[:, None, None, None], images.flip(2), images)
    # the map leads from coordinates in the result to coordinates in the image: the inverse of the augmentations
    inverse_scale = 2 ** (-_SCALE_STD * scale)
    stretching = _diagonal(2 ** (-_STRETCH_STD * stretch), 2 ** (_STRETCH_STD * stretch))
    stretching = _rotation(stretch_axis) @ stretching @ _rotation(-stretch_axis)
    linear = _diagonal(inverse_scale, inverse_scale) @ _rotation(angle) @ stretching  # (n, 2, 2)
    shift = torch.stack([shift_x * images.shape[3], shift_y * images.shape[2]], 1) * _SHIFT_STD  # (n, 2)
    is_warped = applied[1:].any(0)[:, None, None, None]  # any augmentation other than flips
    images = torch.where(is_warped, _warp(images, linear, shift), images)

    rotation_labels = [angle.cos() - 1, angle.sin()]
    stretch_labels = [stretch * stretch_axis.cos(), stretch * stretch_axis.sin()]
    labels = [flip_x, flip_y, scale, *rotation_labels, *stretch_labels, shift_x, shift_y]
    return images, torch.stack(labels, 1).float()


def _rotation(angle: PerSample) -> Matrices:
    """Return matrices (n, 2, 2) that act on (x, y), and rotate from the x axis to the y axis by angles in radians."""
    return torch.stack([angle.cos(), -angle.sin(), angle.sin(), angle.cos()], 1).view(-1, 2, 2)


def _diagonal(x: PerSample, y: PerSample) -> Matrices:
    """Return matrices (n, 2, 2) with the elements of `x` and `y`, (n,) each, on the diagonal: they scale x and y."""
    return torch.diag_embed(torch.stack([x, y], 1))


def _warp(images: Images, linear: Matrices, shift: Translations) -> Images:
    """Return affinely transformed images: position q of the result shows position ``linear (q - shift)`` of the image.

    Positions are in pixels from the centre. The images are resampled at twice their resolution, with filter `_SYM6`.
    Each image is padded by its whole size, by reflection at its edges. EDM pads by the largest amount that an image of
    the batch needs; here images of a batch do not depend on each other.

    Args:
        images: (n, c, h, w).
        linear: matrices that act on (x, y), (n, 2, 2).
        shift: translations (x, y), (n, 2).
    """
    channels, height, width = images.shape[1:]
    # EDM treats the filter as centred on its middle, although its centre of mass is 0.2 pixels away. Rotated images
    # therefore move by 0.2 pixels, in kairos as in EDM.
    taps = len(_SYM6)
    kernel = _filter(images.device, images.dtype).expand(channels, 1, 1, taps)
    # `fine` holds the padded images, which are upsampled, transformed and downsampled
    fine = functional.pad(images, (width - 1, width - 1, height - 1, height - 1), mode="reflect")
    # Upsample by 2 along the width, then along the height. With padding (taps - 2) / 2, a side of the result is
    # 2 (side - 1) + taps - 2 padding = 2 side. The factors of the filter, sqrt(2) here and 1 / sqrt(2) below, keep the
    # mean of the images. All taps sum to sqrt(2), even taps to 1 / sqrt(2) and odd taps to 1 / sqrt(2). A pixel sums
    # only the even or only the odd taps in upsampling, and all taps in downsampling.
    for weights, stride, padding in _separable_filters(kernel * math.sqrt(2), (taps - 2) // 2):
        fine = functional.conv_transpose2d(fine, weights, stride=stride, padding=padding, groups=channels)
    # positions of the pixels that the final downsampling reads, in double resolution
    x = _fine_positions(width, taps, images.device)
    y = _fine_positions(height, taps, images.device)
    positions = torch.stack(torch.meshgrid(x, y, indexing="xy"), -1)  # (fine height, fine width, 2)
    # positions of the image that appear there, (n, fine height, fine width, 2): linear (q - shift) for row vectors q
    source_positions = (positions - shift[:, None, None]) @ linear.transpose(1, 2)[:, None]
    source_x, source_y = source_positions.unbind(-1)
    # grid_sample expects -1 and 1 at the edges of `fine`. They are fine.shape / 2 fine pixels from the centre, which
    # are fine.shape / 4 pixels of the image.
    grid = torch.stack([4 * source_x / fine.shape[3], 4 * source_y / fine.shape[2]], -1).to(images.dtype)
    fine = functional.grid_sample(fine, grid, align_corners=False)
    # downsample by 2 to the size of the images
    for weights, stride, _ in _separable_filters(kernel / math.sqrt(2), 0):
        fine = functional.conv2d(fine, weights, stride=stride, groups=channels)
    return fine


def _fine_positions(side: int, taps: int, device: torch.device) -> Vector:
    """Return positions along one side at twice the resolution, in pixels from the centre, float64 (2 side + taps - 2,).

    An image at these positions has `side` pixels after downsampling by a filter with `taps` taps.
    """
    # the filter, with stride 2 and no padding, makes (count - taps) / 2 + 1 = side pixels
    count = 2 * side + taps - 2
    centre = (count - 1) / 2
    return (torch.arange(count, device=device, dtype=torch.float64) - centre) / 2


@functools.cache
def _filter(device: torch.device, dtype: torch.dtype) -> Vector:
    """Return the filter `_SYM6` as a tensor (taps,) on a device; a cache avoids copying it in every step."""
    return torch.tensor(_SYM6, device=device, dtype=dtype)


def _separable_filters(
    kernel: FilterBank, padding: int
) -> tuple[tuple[FilterBank, tuple[int, int], tuple[int, int]], ...]:
    """Return weights, stride and padding of two convolutions with stride 2: along the width, then along the height.

    Args:
        kernel: one-dimensional filter, (channels, 1, 1, taps).
        padding: padding along the filtered axis.
    """
    along_width = (kernel, (1, 2), (0, padding))
    along_height = (kernel.transpose(2, 3), (2, 1), (padding, 0))
    return along_width, along_height
