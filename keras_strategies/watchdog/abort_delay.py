"""A delay before aborts, during which the watchdog can report their cause.

JAX's runtime aborts a process from C++ when it considers another process, or
the host of its coordination service, dead. The abort is immediate, cannot be
caught, and has no readable message. A Python handler for SIGABRT would need
the interpreter, in a thread whose state is unknown. So the handler is the C
function `sleep`: it is called with the signal's number, 6, and therefore
blocks the aborting thread for six seconds. In this time the watchdog finds the
cause and ends the process. If it finds none, the abort continues normally.
"""

import ctypes
import faulthandler
import os
import signal


def install() -> bool:
    """Delays later aborts by JAX; returns whether the system allows it."""
    if os.name != "posix":
        return False
    library = ctypes.CDLL(None)
    library.signal.argtypes = [ctypes.c_int, ctypes.c_void_p]
    library.signal.restype = ctypes.c_void_p
    # At an abort, `faulthandler` prints tracebacks and then calls the handler
    # that was installed when it was enabled. So it is enabled again only after
    # our handler is installed.
    is_dumping = faulthandler.is_enabled()
    faulthandler.disable()
    sleep = ctypes.cast(library.sleep, ctypes.c_void_p)
    library.signal(int(signal.SIGABRT), sleep)
    if is_dumping:
        faulthandler.enable()
    return True
