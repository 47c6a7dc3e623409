"""Keeps the user's files as they are while a script is rehearsed.

What the script writes outside of temporary folders goes to a scratch folder, and the script reads it back from there.
What it renames or removes there is renamed or gone for the script alone.

    overlay.py     overlays of Linux, for everything that runs in the rehearsal: rehearse/enter.py mounts them
    guard.py       where the kernel does not allow these: Python's own functions
    landlock.py    beside guard.py: the kernel refuses what Python's functions do not see
    protection.py  what the user's Python does about it, and what is said of it
    places.py      which folders are temporary, and which are protected even there
"""
