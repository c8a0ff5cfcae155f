"""A pretrained autoencoder of diffusers (see `codec.KINDS`), from a folder or the Hugging Face hub."""

from typing import Any

from kairos.autoencoders.codec import FILES, load_model
from kairos.autoencoders.settings import AutoencoderConfig
from kairos.errors import ConfigError
from kairos.hub import folder_of


def fetch(config: AutoencoderConfig) -> Any:
    """The model that `autoencoder.path` names, in float32.

    Raises:
        ConfigError: the path is neither a folder with an autoencoder nor a hub id.
        KairosError: the hub cannot be reached and its cache has no copy.
    """
    field, needed = "autoencoder.path", " and ".join(FILES)
    folder = folder_of(str(config.path), field, FILES, needed)
    if missing := [name for name in FILES if not (folder / name).is_file()]:
        raise ConfigError(f"{field}: {config.path!r} lacks {' and '.join(missing)} (a diffusers folder)")
    return load_model(folder)
