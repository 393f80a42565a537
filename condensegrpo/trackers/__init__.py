"""Built-in trackers: adapters to the libraries of experiment trackers, each imported when its run starts.

They import ``core``. Start with ``libraries.py``; ``background.py`` is the thread in which trackers are called.
"""
