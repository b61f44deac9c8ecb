"""A model repository at the Hugging Face hub: whether one may write to it, and uploading a folder."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from huggingface_hub import HfApi, constants, errors, get_token

from palestra.checkpoints import CheckpointError

PREFIX = "hf:"
MADE_BY_THE_HUB = {".gitattributes"}
HTTP_ERROR: type[BaseException] = errors.HfHubHTTPError.__bases__[0]
"""Base of the HTTP client's errors; the client is another in each major version of huggingface_hub."""
LOG_IN = "set HF_TOKEN to one that may write, or log in by `hf auth login`"


class HubRepository:
    """A repository for a model, which need not exist yet."""

    def __init__(self, target: str) -> None:
        """`target` is `hf:ORGANISATION/NAME`. Raises CheckpointError."""
        self.name = target.removeprefix(PREFIX)
        if not target.startswith(PREFIX) or self.name.count("/") != 1:
            raise CheckpointError(f"{target!r} is no place to publish to; write hf:ORGANISATION/NAME")
        self._api = HfApi()

    @property
    def url(self) -> str:
        return f"{constants.ENDPOINT}/{self.name}"

    def check(self, *, update: bool) -> None:
        """Raises CheckpointError if nothing can be uploaded: no token, no rights, or a repository that has something
        already, unless it is to be updated. One that is empty was left by an upload that failed."""
        if constants.HF_HUB_OFFLINE:
            raise CheckpointError("HF_HUB_OFFLINE is set, so nothing is uploaded; unset it")
        if get_token() is None:
            raise CheckpointError(f"there is no token for {constants.ENDPOINT}; {LOG_IN}")
        with self._errors():
            self._check_rights()
            try:
                files = set(self._api.list_repo_files(self.name))
            except errors.RepositoryNotFoundError:
                return
        if files - MADE_BY_THE_HUB and not update:
            raise CheckpointError(
                f"{self.url} exists and has files; choose another name, or add a commit to it with --update"
            )

    def upload(self, folder: Path, *, public: bool, message: str) -> str:
        """Uploads the files in one commit, after making the repository if there is none, and returns the commit. What
        an interrupted upload has already brought is not sent again."""
        with self._errors():
            self._api.create_repo(self.name, private=not public, exist_ok=True)
            return self._api.upload_folder(repo_id=self.name, folder_path=folder, commit_message=message).oid

    def _check_rights(self) -> None:
        user = self._api.whoami()
        namespaces = {user.get("name"), *(one.get("name") for one in user.get("orgs", []))}
        owner = self.name.partition("/")[0]
        if owner not in namespaces:
            raise CheckpointError(f"{user.get('name')} cannot write to {owner}: it is neither a member nor the owner")
        if user.get("auth", {}).get("accessToken", {}).get("role") == "read":
            raise CheckpointError(f"the token may only read; {LOG_IN}")

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except errors.HFValidationError:
            raise CheckpointError(f"{self.name!r} cannot be the name of a repository of the hub") from None
        except errors.HfHubHTTPError as error:
            status = error.response.status_code
            reason = error.server_message or _first_line(error)
            if status == 401:
                raise CheckpointError(f"{constants.ENDPOINT} does not accept the token; {LOG_IN}") from None
            if status == 403:
                raise CheckpointError(f"the token has no right to write to {self.name} ({reason}); {LOG_IN}") from None
            raise CheckpointError(f"{self.url}: {reason}") from None
        except (HTTP_ERROR, OSError) as error:
            raise CheckpointError(
                f"{constants.ENDPOINT} does not answer: is there a network? ({_first_line(error)})"
            ) from None
        except RuntimeError as error:  # of a file; its cause says what happened
            reason = getattr(error.__cause__, "server_message", None) or _first_line(error.__cause__ or error)
            raise CheckpointError(f"the upload to {self.url} broke off ({reason}); repeat the command") from None


def _first_line(error: BaseException) -> str:
    return next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
