"""The entry point of `python -m keras_strategies.cli`, for use off the PATH."""

import sys

from keras_strategies.cli.main import main

sys.exit(main())
