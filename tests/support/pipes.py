"""Reading of files in whose place is a pipe that has no writer."""

import os
import threading


def read_a_pipe(path, read, seconds=10):
    """Puts a pipe in a file's place and reads it: what `read` returns.

    Fails if `read` waits for a writer; then it gets one, and ends.
    """
    os.mkfifo(path)
    results = []
    thread = threading.Thread(target=lambda: results.append(read()))
    thread.start()
    thread.join(seconds)
    if waits := thread.is_alive():
        os.close(os.open(path, os.O_WRONLY | os.O_NONBLOCK))
        thread.join(seconds)
    assert not waits, f"waits for a writer of {path}"
    return results[0]
