"""Conversions of pixels: between uint8 and [-1, 1], and to a lower resolution."""

import torch
from torch.nn.functional import avg_pool2d, interpolate

from kairos.array_shapes import ImageArray
from kairos.shapes import ChannelsLastPixels, Images


def to_float(images: ChannelsLastPixels) -> Images:
    """Convert uint8 images (n, height, width, channels) to float32 (n, channels, height, width) in [-1, 1].

    The result is contiguous and on the device of the images.
    """
    channels_first = images.permute(0, 3, 1, 2)
    if channels_first.device.type == "cpu":
        # `contiguous` changes no strides of grey images; torch selects the convolution, and so the bits, by strides
        return channels_first.contiguous().float() / 127.5 - 1
    return channels_first.to(torch.float32, memory_format=torch.contiguous_format) / 127.5 - 1  # one kernel for both


def to_uint8(images: Images) -> ImageArray:
    """Convert images (n, channels, height, width) in [-1, 1] to uint8 (n, height, width, channels) on the CPU.

    Values are rounded to the nearest level; values outside of [-1, 1] become 0 or 255.
    """
    pixels = ((images.float() + 1) * 127.5).round().clamp(0, 255).byte()
    return pixels.permute(0, 2, 3, 1).contiguous().cpu().numpy()


def reduce_resolution(images: Images, factor: int) -> Images:
    """Downsample images (n, channels, height, width) by averaging, then upsample them bilinearly to their old size.

    ADM's SuperResModel computes its low-resolution condition in this way.

    Args:
        images: float images.
        factor: side in pixels of the averaged squares. If it does not divide height or width, the last rows or columns
            are left out, and the others are stretched over the image.
    """
    return interpolate(avg_pool2d(images, factor), size=images.shape[2:], mode="bilinear")
