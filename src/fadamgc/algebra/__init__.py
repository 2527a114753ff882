"""An algebra of federated optimizers: a local rule, a correction and a server rule make an algorithm."""
