"""Experiments: a TOML spec in; saved runs, tables, figures and a report page out."""
