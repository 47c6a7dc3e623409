"""One file a verb: parses, calls, prints. No logic."""
