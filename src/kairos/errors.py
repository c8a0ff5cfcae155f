"""Errors of the pipeline that its stages share; those of the library are in `kairos_timesteps.errors`."""

from kairos_timesteps.errors import KairosError


class TemporaryError(KairosError):
    """An error that depends on other processes, the machine or the moment, so that another attempt may succeed."""
