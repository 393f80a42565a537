"""The configurations that ship with the package, as YAML files."""
