"""The processes of a trial: the fork server, resident ranks, torchrun, and how ranks meet and end."""
