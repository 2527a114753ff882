"""Specs of experiments: their sections, and how they are read from and written to TOML."""
