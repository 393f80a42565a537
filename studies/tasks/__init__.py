"""Tasks that only studies use, named by their files: ``task.name=studies/tasks/facts.py:FactsTask``."""
