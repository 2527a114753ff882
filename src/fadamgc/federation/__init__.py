"""The server's half of a federated run, and everything that the simulator and Flower share."""
