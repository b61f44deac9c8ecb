"""`palestra model pull`: a model of the Hugging Face hub into the cache on this machine."""

from __future__ import annotations

from pathlib import Path

import httpx
from huggingface_hub import constants, snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

FILES = ["*.json", "*.safetensors", "*.jinja", "*.txt", "*.model"]
"""What a model folder needs; not the same weights again in other formats."""


class PullError(Exception):
    """A model could not be fetched; the message says why and what to do."""


def pull(hub_id: str, revision: str | None = None) -> Path:
    """Fetches what is not in the cache yet, and returns the folder. Raises PullError."""
    endpoint = constants.ENDPOINT
    try:
        folder = Path(snapshot_download(hub_id, revision=revision, allow_patterns=FILES))
    except GatedRepoError:
        raise PullError(
            f"{hub_id} is gated: accept its terms at {endpoint}/{hub_id}, "
            "then set HF_TOKEN or log in by `hf auth login`"
        ) from None
    except RepositoryNotFoundError:
        raise PullError(f"there is no model {hub_id} at {endpoint}, or it is private and needs HF_TOKEN") from None
    except RevisionNotFoundError:
        raise PullError(f"{hub_id} has no revision {revision!r} at {endpoint}") from None
    except HFValidationError:
        raise PullError(f"{hub_id!r} is not an id of the hub; such ids are ORGANISATION/NAME") from None
    except (LocalEntryNotFoundError, OfflineModeIsEnabled, HfHubHTTPError, httpx.HTTPError, OSError) as e:
        reason = (str(e).splitlines() or [type(e).__name__])[0]
        raise PullError(f"{hub_id} could not be fetched from {endpoint}: is there a network? ({reason})") from None
    if not any(folder.glob("*.safetensors")):
        raise PullError(f"{hub_id} has no safetensors weights; only those are supported")
    return folder
