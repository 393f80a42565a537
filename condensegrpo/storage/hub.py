"""The Hugging Face Hub: whether it can be reached, and uploads to it.

Its clients repeat a request for up to a minute before they say that it cannot. Credentials are the library's:
``hf auth login`` or ``HF_TOKEN``.
"""

import os
import shlex
from functools import cache
from pathlib import Path

from condensegrpo.core.credentials import redacted
from condensegrpo.core.errors import RunError
from condensegrpo.core.failures import PluginFailure
from condensegrpo.core.threads import result_in_thread

SECONDS = 3.0  # for one answer, name resolution included
REFUSALS = (403, 407)  # HTTP statuses of a proxy that lets no request through


@cache
def hub_fault() -> str | None:
    """Why the Hub cannot be reached, as the end of a sentence; None: it answers.

    Tested once a process. If the Hub does not answer, or a proxy refuses, its clients stay offline from then on: they
    read what their caches hold and fail at once otherwise.
    """
    from huggingface_hub import constants, get_session

    if constants.is_offline_mode():
        return "HF_HUB_OFFLINE is set"

    def head() -> int:
        return int(get_session().head(constants.ENDPOINT, timeout=SECONDS).status_code)

    # in a thread: no timeout of the client bounds the name resolution
    status = result_in_thread(head, name="the Hugging Face Hub", seconds=SECONDS)
    if isinstance(status, int) and status not in REFUSALS and status < 500:  # a mirror may have no page at its root
        return None
    # read by processes started, and libraries imported, from now on
    os.environ["HF_HUB_OFFLINE"] = "1"
    constants.HF_HUB_OFFLINE = True
    found = "does not answer" if isinstance(status, PluginFailure) else f"answers with the HTTP status {status}"
    return f"{constants.ENDPOINT} {found}"


def model_fault(name: str) -> str | None:
    """Why a model cannot be loaded from the Hub, as the end of a sentence; None: nothing speaks against it."""
    from huggingface_hub import HfApi, try_to_load_from_cache
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    try:
        try_to_load_from_cache(name, "config.json")  # raises for what is no id, without a request
        fault = hub_fault()
        missing = fault is None and not HfApi().repo_exists(name)
    except HFValidationError:
        return "it is no Hub id, which is written owner/name"
    except HfHubHTTPError:  # shows again, with its reason, when the model is loaded
        return None
    return "the Hub has no model of this name that you may read" if missing else fault


def files_of(folder: Path) -> dict[str, int]:
    """The files that an upload would send, with their bytes."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.stat().st_size for path in files}


def upload_to_hub(folder: Path, repository: str, *, public: bool, message: str, endpoint: str | None = None) -> str:
    """Create a model repository unless it exists, and upload a folder as one commit; returns its address.

    Args:
        endpoint: of another Hub than ``HF_ENDPOINT`` says.
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
