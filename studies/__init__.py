"""The studies behind docs/results: study files, their configurations, tasks, estimators and statistics.

It may import everything of the package but its command line, and nothing imports it. Start with ``lab/__main__.py``.
"""
