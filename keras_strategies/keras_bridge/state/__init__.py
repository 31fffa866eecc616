"""The forms in which train steps store the state between steps."""
