"""Results on disk: one JSON record a trial, and the tables made of them."""
