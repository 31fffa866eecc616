"""Hooks that change how Keras's objects behave while a step is traced."""
