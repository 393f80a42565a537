"""Whether the Hugging Face Hub can be reached: its clients repeat a request for up to a minute before they say so."""

import os
import threading
from functools import cache

SECONDS = 3.0  # for one answer, name resolution included
REFUSALS = (403, 407)  # HTTP statuses of a proxy that lets no request through


@cache
def hub_fault() -> str | None:
    """Why the Hub cannot be reached, as the end of a sentence; None: it answers.

    Asked once in a process. If the Hub does not answer, or a proxy refuses, its clients stay offline from then on: they
    read what their caches hold and fail at once otherwise.
    """
    from huggingface_hub import constants, get_session

    if constants.is_offline_mode():
        return "HF_HUB_OFFLINE is set"
    statuses, ended = list[int](), threading.Event()

    def ask() -> None:
        try:
            statuses.append(get_session().head(constants.ENDPOINT, timeout=SECONDS).status_code)
        except Exception:  # boundary to the client: any failure is no answer
            pass
        finally:
            ended.set()

    threading.Thread(target=ask, daemon=True).start()  # a thread: no timeout of the client bounds the name resolution
    ended.wait(SECONDS)
    if statuses and statuses[0] not in REFUSALS and statuses[0] < 500:  # a mirror may have no page at its root
        return None
    # read by processes started, and libraries imported, from now on
    os.environ["HF_HUB_OFFLINE"] = "1"
    constants.HF_HUB_OFFLINE = True
    return f"{constants.ENDPOINT} {f'answers with the HTTP status {statuses[0]}' if statuses else 'does not answer'}"


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
