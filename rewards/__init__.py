"""Rewards: what a finished trajectory is worth."""
