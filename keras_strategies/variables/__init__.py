"""Variables: their creation, and the devices that they are on."""
