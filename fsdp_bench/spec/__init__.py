"""The vocabulary: frozen types, validation, units. No torch, nothing else of the package."""
