"""kairos: compare timestep strategies for diffusion models, from images to a report.

The strategies themselves are the package `kairos_timesteps`.
"""

__version__ = "0.1.0"
