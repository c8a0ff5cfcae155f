"""A pretrained autoencoder of diffusers (see `codec.KINDS`), from a folder or the Hugging Face hub."""

from pathlib import Path
from typing import Any

from kairos.autoencoders.codec import FILES, load_model
from kairos.autoencoders.settings import AutoencoderConfig
from kairos.errors import ConfigError, KairosError


def fetch(config: AutoencoderConfig) -> Any:
    """The model that `autoencoder.path` names, in float32.

    Raises:
        ConfigError: the path is neither a folder with an autoencoder nor a hub id.
        KairosError: the hub cannot be reached and its cache has no copy.
    """
    path = str(config.path)
    if Path(path).is_dir():
        missing = [name for name in FILES if not (Path(path) / name).is_file()]
        if missing:
            raise ConfigError(f"autoencoder.path: folder {path!r} lacks {' and '.join(missing)} (a diffusers folder)")
        return load_model(path)
    if path.startswith((".", "/", "~")) or path.count("/") != 1:
        raise ConfigError(
            f"autoencoder.path: got {path!r}, allowed: a diffusers folder ({' and '.join(FILES)}), or a hub id "
            "OWNER/NAME"
        )
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        return load_model(snapshot_download(path, allow_patterns=list(FILES)))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError, ValueError) as error:
        raise KairosError(
            f"autoencoder.path: {path!r} is no folder here and cannot be had from the hub "
            f"({' '.join(str(error).split())[:200]}). `kairos fetch` brings it where there is a network; or put "
            f"{' and '.join(FILES)} into a folder and set autoencoder.path to it"
        ) from None
