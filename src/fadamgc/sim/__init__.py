"""The simulator: one loop over rounds, interchangeable executors, a cost model, checkpoints."""
