"""Shapes and dtypes of tensors in signatures, such as ``Images``.

Tests check the calls of the modules that tests/checked_modules.py lists. Dimensions with one name have one size in a
call: the sizes of ``Images`` and ``Times`` of a function agree in ``batch``. Further types are defined in the modules
that use them.
"""

from jaxtyping import Bool, Float, Int, Num, Shaped, UInt8
from torch import Tensor

# images

Images = Float[Tensor, "batch channels height width"]
"""Real numbers in the form of images: pixels in [-1, 1], latents, x0, noise or noised images."""

EncodedImages = Float[Tensor, "batch latent_channels latent_height latent_width"]
"""Latents, their moments, or x0, in a signature whose ``Images`` are pixels: the sizes differ."""

Pixels = UInt8[Tensor, "batch channels height width"]
"""Images of uint8."""

ChannelsLastPixels = UInt8[Tensor, "batch height width channels"]
"""Images of uint8 with the channels last, as a data set stores them."""

# one row per sample

Rows = Shaped[Tensor, "batch ..."]
"""One row per sample, of any type and shape, such as the values of a condition."""

PerSample = Float[Tensor, "batch"]
"""One real number per sample, such as a loss."""

Integers = Int[Tensor, "batch"]
"""One integer per sample, such as a class."""

Flags = Bool[Tensor, "batch"]
"""True or False for each sample."""

Times = Num[Tensor, "batch"]
"""Times of the forward process: integers for discrete timesteps, else real numbers."""

EncodedTexts = Float[Tensor, "batch *shape"]
"""A vector, or a sequence of vectors, for each text."""

Features = Float[Tensor, "batch features"]
"""Feature vectors of images."""

LayerFeatures = Float[Tensor, "batch _"]
"""Values of one layer of an extractor, flattened; widths differ between layers."""

Logits = Float[Tensor, "batch classes"]
"""Logits of the classes."""

# networks

Inputs = Float[Tensor, "batch inputs height width"]
"""Input of a network: the channels of x_t, and those of conditions that are images."""

Output = Float[Tensor, "batch output_channels height width"]
"""Output of a network: the channels of x0, and those of a learned variance."""

VarianceChannels = Float[Tensor, "batch variance_channels height width"]
"""Output channels that parametrise a learned reverse variance; 0 channels without a learned variance."""

Tokens = Float[Tensor, "batch tokens hidden_width"]
"""Tokens of a transformer."""

PatchPixels = Float[Tensor, "batch tokens pixel_values"]
"""Pixels of each token's patch, row by row; the channels of a pixel are last."""

Embedding = Float[Tensor, "batch hidden_width"]
"""Embedding of the time and the conditions of each sample."""

FeatureMaps = Float[Tensor, "batch channels rows columns"]
"""Feature maps of a convolution."""

# without a batch

Scalar = Float[Tensor, ""]
"""One number."""

Vector = Float[Tensor, "size"]
"""A one-dimensional tensor without a batch axis, such as filter taps or a flattened gradient."""

PerTimestep = Float[Tensor, "timesteps"]
"""One real number per discrete timestep."""

Bytes = UInt8[Tensor, "bytes"]
"""Memory that contains other tensors."""
