"""From a sweep file to its trials: reading, crossing the grid, choosing models, selecting, naming."""
