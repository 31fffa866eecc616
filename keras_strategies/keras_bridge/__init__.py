"""The bridge to Keras: the only user of `keras.src`.

Each private name used here is pinned by a test in `tests/contract/`.
"""
