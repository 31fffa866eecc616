"""The watchdog of each process: no process goes on, or hangs, alone."""
