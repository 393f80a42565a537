"""``python -m condensegrpo`` is the command ``condensegrpo``."""

from condensegrpo.cli.app import main

main()
