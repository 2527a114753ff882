"""The paper's experiments: published numbers, studies, comparison with our runs, and theory."""
