"""How far one source of numbers is from another, as text and as a page."""
