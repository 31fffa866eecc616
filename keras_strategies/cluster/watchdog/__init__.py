"""The watchdog of each process: none runs on, or hangs, alone."""
