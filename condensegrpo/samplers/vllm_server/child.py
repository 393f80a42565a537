"""The program of a vLLM server: ``python -m condensegrpo.samplers.vllm_server.child [--watched FOLDER] FLAGS``.

It runs vLLM's own server with vLLM's own flags. With ``--watched`` it removes the folder and kills itself and all its
processes when standard input closes: the run that started it holds the other end of that pipe, so that a killed run
leaves neither processes nor weights in memory behind.
vLLM is imported in ``main`` only: its engine is a separate process, which imports this file again.
"""

import os
import shutil
import signal
import sys
import threading


def main() -> None:
    """Serve until a signal ends the process."""
    if "--watched" in sys.argv:
        place = sys.argv.index("--watched")
        folder = sys.argv[place + 1]
        del sys.argv[place : place + 2]
        threading.Thread(target=_end_with_parent, args=(folder,), daemon=True).start()
    from vllm.entrypoints.launchers.api_server.entry import main as serve

    serve()


def _end_with_parent(folder: str) -> None:
    while os.read(0, 4096):
        pass
    shutil.rmtree(folder, ignore_errors=True)  # another server of the run may be removing it too
    os.killpg(0, signal.SIGKILL)  # the group of this server alone: it was started as the leader of a session


if __name__ == "__main__":
    main()
