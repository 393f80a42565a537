"""Settings of the learner. Imports neither torch nor DeepSpeed: the configuration and the planner read them."""

BUCKET = 500_000_000  # elements reduced together at most; DeepSpeed allocates what it is told, however small the model
