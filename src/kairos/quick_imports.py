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
# optional packages that diffusers imports and that fail without the packages above, as peft does without transformers
_DEPENDENT_PACKAGES = ("peft", "timm", "kornia", "optimum", "bitsandbytes", "torchao")
_enabled = False


def enable() -> None:
    """Let this process import diffusers without the packages of its pipelines."""
    global _enabled
    _enabled = True


def disable() -> None:
    """Let this process import diffusers with the packages of its pipelines, which is the default."""
    global _enabled
    _enabled = False


@contextmanager
def without_pipeline_packages() -> Iterator[None]:
    """Hide the packages of diffusers' pipelines inside the block, if quick imports are enabled.

    An import of a hidden package raises ModuleNotFoundError. Packages that are already imported stay visible.
    """
    packages = (*_PIPELINE_PACKAGES, *_DEPENDENT_PACKAGES) if _enabled else ()
    hidden = [name for name in packages if name not in sys.modules]
    for name in hidden:
        sys.modules[name] = None  # type: ignore[assignment]  # makes `import name` raise ModuleNotFoundError
    try:
        yield
    finally:
        for name in hidden:
            del sys.modules[name]
