"""One script per system; each runs in its own environment and uses ``protocol``."""
