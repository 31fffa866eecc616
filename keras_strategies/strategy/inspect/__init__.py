"""Tables and pictures that show strategies and their input."""
