"""``python -m condensegrpo.cli`` is the command ``condensegrpo``."""

from condensegrpo.cli.app import main

main()
