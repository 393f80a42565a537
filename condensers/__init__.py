"""Condensers: how a history is rewritten before a turn."""
