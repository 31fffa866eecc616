"""The bridge to Keras: the only package that uses `keras.src`.

For each private name of Keras that is used here, a test in `tests/contract/`
fails if Keras changes it.
"""
