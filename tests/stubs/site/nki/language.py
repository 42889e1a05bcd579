"""A stub: see ../../README.md."""
