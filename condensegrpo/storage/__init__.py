"""What is written to disk and read back: run folders, metrics and trajectory files, and data set rows.

It imports ``core``. Start with ``run_folder.py``; ``files.py`` holds the safe writes that the others use.
"""
