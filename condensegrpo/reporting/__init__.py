"""Reports and plots of finished and running runs.

It imports floors 1 to 6. Start with ``run_report.py``.
"""
