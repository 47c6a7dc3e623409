"""Reading: tables and charts."""
