"""The trajectory engine: from a problem to a trajectory."""
