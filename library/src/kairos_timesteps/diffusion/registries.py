"""Forward processes by name."""

from kairos_timesteps.registry import Registry

PROCESSES = Registry("process", "kairos_timesteps.diffusion.processes")
process = PROCESSES.register
