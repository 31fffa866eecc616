"""Runs the tool as `python -m keras_strategies.cli`, if it is not on PATH."""

import sys

from keras_strategies.cli.main import main

sys.exit(main())
