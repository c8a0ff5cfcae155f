"""Modules and packages whose calls the tests check against the shapes and types in their signatures, with beartype."""

CHECKED_MODULES = [
    "kairos.analyses.gradients",
    "kairos.autoencoders.codec",
    "kairos.autoencoders.train",
    "kairos.conditions",
    "kairos.data.augment",
    "kairos.data.batches",
    "kairos.data.latents",
    "kairos.data.random_order",
    "kairos.evaluation.classifier",
    "kairos.evaluation.dinov2",
    "kairos.evaluation.inception",
    "kairos.evaluation.measurements",
    "kairos.losses.terms",
    "kairos.models",
    "kairos.sampling.generate",
    "kairos.sampling.solvers",
    "kairos.text_encoders",
    "kairos.training.loop",
]
