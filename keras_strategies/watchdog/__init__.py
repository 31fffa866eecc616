"""The watchdog: if one process of a job dies or hangs, all processes exit."""
