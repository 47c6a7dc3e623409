"""Running trials: processes that are started, watched and ended, and how each trial's outcome is decided."""
