"""What developers need and users do not: not installed."""
