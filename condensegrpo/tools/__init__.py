"""Built-in tools: plain typed functions."""
