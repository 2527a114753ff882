"""The command ``fadamgc``."""
