"""The measured largest model: each cell of a [frontier] sweep is searched with real trials."""
