"""Checkpoints of the Hugging Face Hub, with the cache and the settings of huggingface_hub."""

import pathlib

FILES = ("*.json", "*.safetensors", "*.jinja", "*.txt", "*.model")  # never code, never pickled weights


def download(name: str, revision: str | None = None) -> pathlib.Path:
    """Returns the local directory of a Hub id like "owner/name".

    Missing files are downloaded. HF_HOME sets the cache, HF_TOKEN the token, and HF_HUB_OFFLINE forbids the network.

    Raises:
      ValueError: if there is no repository of that name, or the Hub cannot be reached.
    """
    neither = (
        "path must be a directory, a GGUF file, smollm2 or an id of the Hugging Face Hub like 'owner/name', "
        f"got {name!r}"
    )
    if name.count("/") != 1 or name.startswith((".", "/", "~")):
        raise ValueError(neither)
    from huggingface_hub import errors, snapshot_download  # takes most of a second to import

    try:
        return pathlib.Path(snapshot_download(name, revision=revision, allow_patterns=list(FILES)))
    except errors.HFValidationError as error:
        raise ValueError(f"{neither}: {error}") from error
    except (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled) as error:
        raise ValueError(
            f"{neither}. It is no local directory and not in the cache, and the Hub cannot be reached or "
            f"HF_HUB_OFFLINE is set: {error}"
        ) from error
    except (errors.HfHubHTTPError, OSError) as error:
        raise ValueError(f"{neither}. The Hub reports: {error}") from error
