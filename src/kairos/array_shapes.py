"""Shapes and dtypes of numpy arrays in signatures, such as ``PixelArray``; importing this module does not import torch.

Module `shapes` has the types of tensors. Its docstring describes when tests check types, and which sizes must agree.
"""

import numpy as np
from jaxtyping import Bool, Float, Int, Shaped, UInt8

# one row per sample

PixelArray = UInt8[np.ndarray, "batch height width channels"]
"""Images of uint8."""

IndexArray = Int[np.ndarray, "batch"]
"""One integer per sample, such as the index of an image."""

FlagArray = Bool[np.ndarray, "batch"]
"""True or False for each sample."""

RowArray = Shaped[np.ndarray, "batch ..."]
"""One row per sample, of any type and shape, such as the values of a condition."""

FeatureArray = Float[np.ndarray, "batch features"]
"""Feature vectors of images."""

# without a batch

ImageArray = UInt8[np.ndarray, "height width channels"]
"""One image of uint8."""

Mean = Float[np.ndarray, "dimensions"]
"""Mean of feature vectors."""

Covariance = Float[np.ndarray, "dimensions dimensions"]
"""Covariance of feature vectors."""

Gaussian = tuple[Mean, Covariance]
"""Mean and covariance of feature vectors."""
