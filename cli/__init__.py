"""The command line. It shows and asks; every decision is made on the floors below."""
