"""Built-in tasks: problems and the environments that pose them."""
