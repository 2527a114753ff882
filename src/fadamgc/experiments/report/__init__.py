"""Tables, plots and the page of an experiment, from its saved runs."""
