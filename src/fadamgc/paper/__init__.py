"""The paper's own experiments: published numbers, studies, comparison with our runs, and theory."""
