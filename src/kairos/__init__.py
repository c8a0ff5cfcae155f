"""kairos: train diffusion models on the timesteps that matter."""

__version__ = "0.1.0"
