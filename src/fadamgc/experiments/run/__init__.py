"""Running the experiment that a spec describes."""
