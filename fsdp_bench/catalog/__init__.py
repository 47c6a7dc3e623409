"""Data: facts about hardware, each with its source and date."""
