"""What to change where a setup does not fit: settings that need less memory, and more GPUs."""
