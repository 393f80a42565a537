"""What is written to disk and read back: run folders, trajectory files, data set rows, and the built-in trackers.

It imports ``core``. Start with ``run_folder.py``; ``files.py`` holds the safe writes that the others use.
"""
