"""A quick import of diffusers, without packages that only its pipelines use.

diffusers imports transformers, torchvision and scipy wherever they are installed, which takes half of the time of its
import. Its autoencoders and U-Nets use none of them. In a process of a kairos command these packages look absent while
diffusers is imported, and only then. Pipelines of diffusers would miss the packages afterwards. Commands whose
experiment has plugins, and other processes, such as a notebook's, therefore import diffusers as usual.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager

_PIPELINE_PACKAGES = ("transformers", "torchvision", "scipy")
_enabled = False


def enable() -> None:
    """Enable quick imports: from now on `without_pipeline_packages` hides the packages of diffusers' pipelines."""
    global _enabled
    _enabled = True


def disable() -> None:
    """Disable quick imports, which is the default: `without_pipeline_packages` then hides nothing."""
    global _enabled
    _enabled = False


@contextmanager
def without_pipeline_packages() -> Iterator[None]:
    """Hide the packages of diffusers' pipelines from imports inside a with block, if quick imports are enabled.

    An import of a hidden package raises ModuleNotFoundError. Packages that were imported before stay visible.
    """
    hidden = [name for name in _PIPELINE_PACKAGES if _enabled and name not in sys.modules]
    for name in hidden:
        sys.modules[name] = None  # type: ignore[assignment]  # documented: the import then finds no such module
    try:
        yield
    finally:
        for name in hidden:
            del sys.modules[name]
