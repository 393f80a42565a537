"""What an inspector shows of a run, as values: the terminal, the HTML page and Python render them.

``Index`` reads the figures of the trajectories of a run or file, and single trajectories; ``views`` has the ready
views and the search; ``panes`` has what is shown of one turn; ``inspector_page`` is the HTML page. May import lower
floors; no torch, rich or textual.
Start with ``index``.
"""
