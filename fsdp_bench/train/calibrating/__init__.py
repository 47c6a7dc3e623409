"""Timing single operators, copies and collectives on this machine."""
