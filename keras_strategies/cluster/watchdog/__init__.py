"""The watchdog: if one process of a job dies or hangs, all of them exit."""
