"""The program of a vLLM server: ``python -m condensegrpo.samplers.vllm_server.child [--watched] FLAGS``.

It is vLLM's own server with vLLM's own flags. With ``--watched`` it ends, with all its processes, when standard input
closes: the other end of that pipe is held by the run that started it, so that a run that is killed leaves nothing
behind. Imports vLLM only in ``main``: vLLM starts its engine as a process of its own, which imports this file anew.
"""

import os
import signal
import sys
import threading


def main() -> None:
    """Serve until told to stop."""
    if "--watched" in sys.argv:
        sys.argv.remove("--watched")
        threading.Thread(target=_end_with_parent, daemon=True).start()
    from vllm.entrypoints.launchers.api_server.entry import main as serve

    serve()


def _end_with_parent() -> None:
    while os.read(0, 4096):
        pass
    os.killpg(0, signal.SIGKILL)  # the process group is ours: we were started as the leader of a session


if __name__ == "__main__":
    main()
