"""`palestra sweep`: a population of runs at one server, and what it found."""
