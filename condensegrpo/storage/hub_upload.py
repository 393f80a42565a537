"""Uploads a folder to the Hugging Face Hub. Credentials are the library's: ``hf auth login`` or ``HF_TOKEN``."""

import shlex
from pathlib import Path

from condensegrpo.core.credentials import redacted
from condensegrpo.core.errors import RunError


def files_of(folder: Path) -> dict[str, int]:
    """The files that an upload would send, with their bytes."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.stat().st_size for path in files}


def upload(folder: Path, repository: str, *, public: bool, message: str, endpoint: str | None = None) -> str:
    """Create a model repository unless it exists, and upload a folder as one commit; returns its address.

    Args:
        endpoint: of another Hub than ``HF_ENDPOINT`` says.

    Raises:
        RunError: the Hub cannot be reached or refuses the upload; names the folder, which is complete.
    """
    from huggingface_hub import HfApi

    try:
        api = HfApi(endpoint=endpoint)
        api.create_repo(repository, private=not public, exist_ok=True)
        commit = api.upload_folder(folder_path=folder, repo_id=repository, commit_message=message)
    except Exception as error:  # the boundary to the Hub, whose HTTP library raises errors of its own
        raise RunError(
            f"uploading {folder} to {repository}: {redacted(str(error)).strip()}. The folder is complete; check "
            f"`hf auth whoami` and the name, then run: {shlex.join(['hf', 'upload', repository, str(folder)])}"
        ) from error
    return str(commit.repo_url)
