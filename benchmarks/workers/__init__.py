"""One script for each system; each runs in an environment of its own and speaks ``protocol``."""
