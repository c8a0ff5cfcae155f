"""Names of devices, and detection of NVIDIA's driver; without torch, whose import takes seconds."""

from pathlib import Path

DEVICE_PATTERN = r"auto|cpu|cuda(:\d+)?"  # regular expression of the device names that kairos accepts


def has_nvidia_driver() -> bool:
    """Return True if NVIDIA's driver runs on this machine.

    torch may still be unable to use the GPU, for example if torch was built for CPUs only.
    """
    return Path("/dev/nvidiactl").exists()
