"""How other libraries call the package."""
