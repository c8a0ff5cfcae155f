"""Shapes and dtypes of numpy arrays in signatures, such as ``ImageArray``; importing this module does not import torch.

Module `shapes` has the types of tensors. Its docstring describes when tests check types, and which sizes must agree.
"""

import numpy as np
from jaxtyping import Bool, Float, Int, Shaped, UInt8

# one row per sample

ImageArray = UInt8[np.ndarray, "batch height width channels"]
"""Images of uint8 with the channels last, as a data set stores them."""

ImageBatch = UInt8[np.ndarray, "_ height width channels"]
"""A batch of uint8 images, channels last. Batches in one call may differ in the number of images, not in their size."""

IntegerArray = Int[np.ndarray, "batch"]
"""One integer per sample, such as the index of an image or an epoch."""

FlagArray = Bool[np.ndarray, "batch"]
"""True or False for each sample."""

RowArray = Shaped[np.ndarray, "batch ..."]
"""One row per sample, of any type and shape, such as the values of a condition."""

FeatureArray = Float[np.ndarray, "batch features"]
"""Feature vectors of images."""

# without a batch

SingleImage = UInt8[np.ndarray, "height width channels"]
"""One image of uint8 with the channels last."""

Mean = Float[np.ndarray, "dimensions"]
"""Mean of feature vectors."""

Covariance = Float[np.ndarray, "dimensions dimensions"]
"""Covariance of feature vectors."""

Gaussian = tuple[Mean, Covariance]
"""Mean and covariance of feature vectors."""

# by layer of an extractor; widths differ between layers, so their dimensions have no names

LayerMean = Float[np.ndarray, "_"]
"""Mean of a layer's feature vectors."""

LayerCovariance = Float[np.ndarray, "_ _"]
"""Covariance of a layer's feature vectors, or its root."""

LayerGaussian = tuple[LayerMean, LayerCovariance]
"""Mean and covariance of a layer's feature vectors."""
