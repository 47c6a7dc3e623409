"""Keeps the user's files as they are while a script is rehearsed.

Outside of temporary folders the script's changes go to a scratch folder, and the script alone reads them from there.

    overlay.py     overlays of Linux, for everything that runs in the rehearsal: rehearse/enter.py mounts them
    guard.py       where the kernel does not allow these: Python's own functions
    scratch.py     beside guard.py: the folder that it changes instead
    protection.py  what the user's Python does about it, and what is said of it
    places.py      which folders are temporary, and which are protected even there
"""
