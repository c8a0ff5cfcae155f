"""Weightings. An import of the package registers all of them, in the order in which lists show them."""

# isort: off
from kairos_timesteps.weightings import fixed, change_aware, coarse_to_fine, uncertainty  # noqa: F401
