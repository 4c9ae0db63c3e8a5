"""How a case is run, timed against its peers and reported."""
