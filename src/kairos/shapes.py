"""Shapes and dtypes of tensors in signatures, such as ``Images``; the tests check each call against them.

Dimensions with one name have one size within a call: the sizes of ``Images`` and ``Times`` of a function agree in
``batch``.
"""

from jaxtyping import Float, Num, UInt8
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

Times = Num[Tensor, "batch"]
"""Times of the forward process: integers for discrete timesteps, else real numbers."""

Counts = Num[Tensor, "batch"]
"""A weight or count for each sample."""

PerSample = Float[Tensor, "batch"]
"""A value for each sample, such as a loss."""

Features = Float[Tensor, "batch features"]
"""Feature vectors of images."""

Logits = Float[Tensor, "batch classes"]
"""Logits of the classes."""
