"""Small models for tests, benchmarks and demos: random weights in real model folders, and a puppet that follows a
script. `palestra model random` and `palestra model puppet` make them."""
