"""Samplers. An import of the package registers all of them, in the order in which lists show them."""

# isort: off
from kairos_timesteps.samplers import fixed, log_snr, combined, speed, losses, info_noise, gradients  # noqa: F401
from kairos_timesteps.samplers import adaptive, adaptive_official  # noqa: F401
