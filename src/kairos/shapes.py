"""Shapes and dtypes of tensors in signatures, such as ``Images``; the tests check each call against them.

Dimensions with one name have one size within a call: the sizes of ``Images`` and ``Times`` of a function agree in
``batch``.
"""

from jaxtyping import Bool, Float, Int, Num, Shaped, UInt8
from torch import Tensor

Images = Float[Tensor, "batch channels height width"]
"""x0, noise or noised images in model space."""

EncodedImages = Float[Tensor, "batch latent_channels latent_height latent_width"]
"""Images in model space, or moments of their latents, in a signature that also has images in pixel space."""

AugmentationLabels = Float[Tensor, "batch labels"]
"""Labels of augmentations that a network takes as a condition."""

Matrices = Float[Tensor, "batch 2 2"]
"""Linear maps of the plane."""

Vectors = Float[Tensor, "batch 2"]
"""Vectors of the plane."""

Output = Float[Tensor, "batch output_channels height width"]
"""Output of a network: the channels of x0, and those of a learned variance."""

Pixels = UInt8[Tensor, "batch channels height width"]
"""Images of uint8."""

ChannelsLastPixels = UInt8[Tensor, "batch height width channels"]
"""Images of uint8 with the channels last, as a data set stores them."""

Times = Num[Tensor, "batch"]
"""Times of the forward process: integers for discrete timesteps, else real numbers."""

Counts = Num[Tensor, "batch"]
"""A weight or count for each sample."""

PerSample = Float[Tensor, "batch"]
"""A value for each sample, such as a loss."""

PerTimestep = Float[Tensor, "timesteps"]
"""A value for each discrete timestep."""

Features = Float[Tensor, "batch features"]
"""Feature vectors of images."""

Logits = Float[Tensor, "batch classes"]
"""Logits of the classes."""

Classes = Int[Tensor, "batch"]
"""The index of a class for each image."""

Selection = Bool[Tensor, "batch"]
"""True for each selected image."""

PerImage = Shaped[Tensor, "batch ..."]
"""A tensor with a row for each image, such as a condition."""

Tokens = Float[Tensor, "batch tokens hidden_width"]
"""Tokens of a transformer."""

PackedTokens = Float[Tensor, "batch tokens packed_width"]
"""Tokens, with queries, keys and values, or the pixels of a patch, one after another."""

Embedding = Float[Tensor, "batch hidden_width"]
"""Embedding of the time and the conditions of each image."""

FeatureMaps = Float[Tensor, "batch channels rows columns"]
"""Feature maps of a convolution."""

Scalar = Float[Tensor, ""]
"""One number."""

Vector = Float[Tensor, "size"]
"""Numbers without relation to the images of a batch."""

FilterBank = Float[Tensor, "channels 1 _ _"]
"""A filter for each channel."""

Bytes = UInt8[Tensor, "bytes"]
"""Memory that contains other tensors."""
