"""What would help where nothing fits: other settings, more GPUs, each confirmed by a prediction."""
