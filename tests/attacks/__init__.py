"""Drivers that attack the package at random and check what must hold whatever they do; each has a seed and a count.

``records``: results that are damaged on disk. ``signals``: sweeps whose processes are killed, stopped and interrupted.
"""
